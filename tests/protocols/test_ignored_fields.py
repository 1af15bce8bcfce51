"""Fields that nobody knows: ignored and reported; misspellings refused."""

from __future__ import annotations

import pytest

from asr_serve.errors import OptionError, UnknownOption
from asr_serve.protocols import form_fields
from asr_serve.protocols.form_fields import FormFields
from asr_serve.protocols.ignored_fields import MAX_REPORTED, IgnoredFields, collect_ignored_fields
from asr_serve.protocols.json_members import JsonMembers
from asr_serve.protocols.openai.models import is_openai_recognition_model, is_openai_speech_model
from asr_serve.protocols.openai.transcription_form import TRANSCRIPTION_FIELDS

OTHERS = [
    "user",
    "seed",
    "frequency_penalty",
    "to_language",
    "top_n",
    "temperature_inc",
    "vad_filter",
    "stream_options",
    "",
]
"""Fields of other servers' transcriptions."""
MISSPELT = {
    "langauge": "language",
    "Language": "language",
    "promt": "prompt",
    "responseFormat": "response_format",
    "keyword": "keywords[]",
    "diarize": "spk",
    "word_timestamps": "timestamp_granularities[]",
}


def read(*names: str, strict: bool = False) -> str:
    ignored = IgnoredFields(strict=strict)
    with collect_ignored_fields(ignored):
        fields = FormFields({"language": ["en"], **{name: ["1"] for name in names}}, TRANSCRIPTION_FIELDS)
    assert fields.text("language") == "en"
    return str(ignored)


@pytest.mark.parametrize("name", OTHERS)
def test_a_field_that_nobody_knows_is_ignored(name: str) -> None:
    assert read(name) == (name or "''")
    with pytest.raises(OptionError, match="unknown field"):
        read(name, strict=True)
    with pytest.raises(OptionError, match="unknown field"):  # no request: a call of the library
        FormFields({name: ["1"]}, TRANSCRIPTION_FIELDS)


@pytest.mark.parametrize(("name", "meant"), MISSPELT.items())
def test_a_misspelling_is_refused(name: str, meant: str) -> None:
    with pytest.raises(OptionError, match="did you mean") as refused:
        read(name)
    assert repr(meant) in str(refused.value)
    assert refused.value.param == name


def test_names_are_printable_and_bounded() -> None:
    shown = read("\r\nset-cookie: a=b", "é", "x" * 500, "user", "user")
    assert shown.isascii()
    assert shown.isprintable()
    assert len(shown) < 150
    assert shown.endswith(", user")
    many = read(*(f"f{n}" for n in range(MAX_REPORTED + 5)))
    assert many.endswith("f31, 5 more")


def test_members_of_objects_are_reported_by_their_path() -> None:
    ignored = IgnoredFields()
    with collect_ignored_fields(ignored):
        members = JsonMembers({"session": {"audio": {"rate": 1, "colour": 2}}, "tools": []})
        session = members.object("session")
        assert session is not None
        audio = session.object("audio")
        assert audio is not None
        assert audio.number("rate", 0, 2, 0) == 1
        for each in (audio, session, members):
            each.refuse_or_ignore_unknown()
        misspelt = JsonMembers({"thershold": 1}, "session")
        assert "threshold" not in misspelt  # asked for, which makes it known
        with pytest.raises(UnknownOption, match=r"session\.thershold.*did you mean 'threshold'"):
            misspelt.refuse_or_ignore_unknown()
    assert str(ignored) == "session.audio.colour, tools"


def test_names_beyond_the_limit_are_counted_once_though_a_form_is_parsed_twice() -> None:
    ignored = IgnoredFields()
    names = {f"colour_{number}": ["1"] for number in range(MAX_REPORTED + 5)}
    with collect_ignored_fields(ignored):
        for _ in range(2):
            FormFields(names, TRANSCRIPTION_FIELDS)
    assert str(ignored).endswith(", 5 more")


def test_no_nearest_name_is_looked_for_before_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(form_fields, "suggest_name", lambda name, known: looked.append(name) or "")
    assert read("colour") == "colour"
    assert looked == []
    with pytest.raises(OptionError, match="unknown field"):
        read("colour", strict=True)
    assert looked == ["colour"]


def test_names_of_openai_models() -> None:
    hear = ("whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe-2025-12-15", "gpt-4o-transcribe-diarize")
    assert all(map(is_openai_recognition_model, (*hear, "gpt-realtime", "gpt-realtime-whisper")))
    assert all(map(is_openai_speech_model, ("tts-1", "tts-1-hd", "gpt-4o-mini-tts-2025-12-15")))
    assert not any(map(is_openai_recognition_model, ("whisper", "gpt-4o", "whisper-10", "tts-1", "gpt-realtimes")))
    assert not any(map(is_openai_speech_model, ("tts", "tts-10", "whisper-1")))
