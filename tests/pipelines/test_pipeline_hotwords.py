"""Hotwords, from the caller's list to the text: what is found, what is never said, and who is disturbed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from case_tiers import exhaustive_after

import asr_serve
from asr_serve.api.library import Model
from asr_serve.audio.reader import read_audio
from asr_serve.config import EngineConfig
from asr_serve.decoding.biasing_graph import MOST_WORDS
from asr_serve.errors import OptionError
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card, asr_cards
from asr_serve.pipelines.prompting import hotword_bias
from asr_serve.text.tokenizers import BytePieceTokenizer, SentencePieceTokenizer, first_unencodable_letter

NAMES = ["Quilter", "Leighton", "Beckett", "Nagg", "Nell", "Worstward", "you", "thanks", "Bye", "music"]
RATE = 16_000


def names(count: int) -> list[str]:
    rng = random.Random(count)
    parts = ["ba", "ko", "ri", "ten", "sha", "mol", "gu", "vex", "lin", "tra", "do", "pem"]
    return sorted({"".join(rng.choices(parts, k=4)).capitalize() for _ in range(2 * count)})[:count]


@pytest.fixture(scope="module", params=["moonshine-tiny-en", "whisper-tiny-en"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    if store.locate(asr_card(request.param)) is None:
        pytest.skip(f"no weights of {request.param}")
    with asr_serve.load(
        request.param, device="cpu", dtype="fp32", turn_model="none", engine=EngineConfig(prefix_bytes=1 << 26)
    ) as loaded:
        yield loaded


# --- what is found --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_word_that_was_misheard_is_found(model: Model, packaged_speech: Path):
    clip = packaged_speech / "endgame_nagg_nell.wav"
    plain = model.transcribe(clip)[0].text
    if "heartly" not in plain:
        pytest.skip(f"{model.card.name} hears it as it is")
    for words in (["HEARTILY:2"], ["heartily", *names(2_000)]):
        assert "heartily" in model.transcribe(clip, hotwords=words)[0].text.lower()
    assert model.transcribe(clip)[0].text == plain, "what was kept of one list answers another"


@pytest.mark.slow
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.repeats(model="moonshine-tiny-en", beam=3)
@pytest.mark.repeats(model="whisper-tiny-en", beam=1)
def test_a_word_is_written_as_the_caller_writes_it(model: Model, packaged_speech: Path, beam: int):
    clip = packaged_speech / "beckett.wav"
    plain = model.transcribe(clip, beam=beam)[0].text
    assert "failed" in plain
    assert "FAiled" in model.transcribe(clip, beam=beam, hotwords=["FAiled"])[0].text
    assert model.transcribe(clip, beam=beam, hotwords=["matter"])[0].text == plain


def test_words_come_with_times_and_one_probability_for_each_token(model: Model, packaged_speech: Path):
    (found,) = model.transcribe(packaged_speech / "endgame_nagg_nell.wav", hotwords=["heartily"], words=True)
    said = [word for segment in found.segments for word in segment.words]
    hearty = [word for word in said if word.text.strip(".,").lower() == "heartily"]
    assert len(hearty) >= 2
    assert all(word.start_samples < word.end_samples for word in hearty)
    assert all(len(segment.tokens) == len(segment.logprobs) for segment in found.segments)


@pytest.mark.slow
@pytest.mark.repeats(model="whisper-tiny-en")
def test_while_somebody_speaks_the_last_text_has_it(model: Model, packaged_speech: Path):
    audio = read_audio(packaged_speech / "endgame_nagg_nell.wav")[: 12 * RATE]
    *_, last = model.stream(audio, hotwords=["heartily"])
    assert "heartily" in last.text.lower()


# --- what is never said ---------------------------------------------------------------------------------


def noises() -> dict[str, np.ndarray]:
    rng, t = np.random.default_rng(7), np.arange(6 * RATE) / RATE
    chord = sum(np.sin(2 * np.pi * hz * t) * np.exp(-((t * 2) % 1)) for hz in (261.6, 329.6, 392.0, 523.3))
    return {
        "silence": np.zeros(len(t)),
        "room": rng.normal(size=len(t)) * 1e-3,
        "white": rng.normal(size=len(t)) * 0.1,
        "hum": 0.2 * np.sin(2 * np.pi * 50 * t) + 0.1 * np.sin(2 * np.pi * 150 * t),
        "chords": 0.1 * chord,
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", exhaustive_after(2, ["silence", "chords", "room", "white", "hum"]))
@pytest.mark.parametrize("vad", [True, False])
@pytest.mark.repeats(model="whisper-tiny-en", vad=True)
def test_nobody_speaks_and_no_hot_word_is_said(model: Model, kind: str, vad: bool):
    audio = noises()[kind].astype(np.float32)
    plain = model.transcribe(audio, vad=vad)[0].text
    # Told that all of it is speech, Moonshine thanks for watching chords: only then a weight may change a letter.
    for words in (NAMES, [f"{name}:10" for name in NAMES] if vad else NAMES[:5], names(1_000)):
        told = model.transcribe(audio, vad=vad, hotwords=words)[0].text
        new = set(told.lower().split()) - set(plain.lower().split())
        assert not new & {word.partition(":")[0].lower() for word in words}
        assert not vad or told == plain == ""


@pytest.mark.slow
@pytest.mark.repeats(model="whisper-tiny-en")
def test_what_is_not_spoken_of_is_not_said(model: Model, packaged_speech: Path):
    clip = packaged_speech / "two_cities.wav"
    assert model.transcribe(clip, hotwords=names(3_000))[0].text == model.transcribe(clip)[0].text


# --- who is disturbed -----------------------------------------------------------------------------------


def test_others_in_the_batch_are_not_touched(model: Model, packaged_speech: Path):
    clips = [read_audio(packaged_speech / name)[: 15 * RATE] for name in ("beckett.wav", "two_cities.wav")]
    alone = [each.text for each in model.transcribe(clips)]
    client = model._client
    bias = hotword_bias(client, BytePieceTokenizer([]), names(MOST_WORDS))
    assert bias
    from asr_serve.decoding.search_options import SearchOptions

    long = client.submit(clips[0], SearchOptions(bias=bias, language="en"), "bulk", wait=True)
    others = [each.text for each in model.transcribe(clips)]
    assert others == alone
    assert long.future.result(60).tokens


def test_whoever_leaves_while_a_list_is_read_holds_nothing(model: Model, packaged_speech: Path):
    from asr_serve.decoding.search_options import SearchOptions
    from asr_serve.errors import Cancelled

    client = model._client
    bias = hotword_bias(client, BytePieceTokenizer([]), names(MOST_WORDS - 1))
    clip = read_audio(packaged_speech / "beckett.wav")
    ticket = client.submit(clip, SearchOptions(bias=bias, language="en"), "bulk", wait=True)
    client.cancel(ticket)
    with pytest.raises(Cancelled):
        ticket.future.result(60)
    assert model.transcribe(clip)[0].text


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("Ada", 'a list of texts. like ["Ada"]'),
        ([1], "a list of texts"),
        (None, "a list of texts"),
        (["x"] * (MOST_WORDS + 1), f"up to {MOST_WORDS}"),
        (["Ada", ""], "a word with a letter"),
        (["x" * 201], "up to 200"),
        (["x" * 200] * 1_311, "hotwords of 262200 characters together. up to 262144"),
        (["Ada:99"], "0.1 to 10"),
        (["Ada", "東京"], "hotword '東京' has the letter '東'. moonshine-tiny-en writes Latin letters"),
        (["Москва"], "hotword 'Москва' has the letter 'М'"),
    ],
)
def test_bad_lists(words: Any, says: str):
    client: Any = SimpleNamespace(card=asr_card("moonshine-tiny-en"))
    with pytest.raises(OptionError) as refused:
        hotword_bias(client, BytePieceTokenizer([]), words)
    assert refused.value.param == "hotwords"
    assert says in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_model_of_many_languages_writes_all_of_them():
    name = next(name for name, each in asr_cards().items() if each.kind == "whisper" and len(each.languages) > 50)
    client: Any = SimpleNamespace(card=asr_card(name))
    assert hotword_bias(client, BytePieceTokenizer([]), ["東京", "Москва:2"]) == "東京\t1\nМосква\t2"
    assert hotword_bias(client, BytePieceTokenizer([]), []) == ""


# --- how they are spelt ---------------------------------------------------------------------------------


def test_moonshine_spells_as_it_was_taught(packaged_speech: Path):
    """What the model itself says of real speech, cut again, comes out as the tokens that it said."""
    name = "moonshine-tiny-en"
    if store.locate(asr_card(name)) is None:
        pytest.skip(f"no weights of {name}")
    with asr_serve.load(name, device="cpu", turn_model="none") as loaded:
        vocabulary = loaded.tokenizer
        assert isinstance(vocabulary, BytePieceTokenizer)
        clips = [packaged_speech / each for each in ("beckett.wav", "two_cities.wav", "endgame_nagg_nell.wav")]
        segments = [segment for found in loaded.transcribe(clips) for segment in found.segments]
    assert sum(len(segment.tokens) for segment in segments) > 100
    for segment in segments:
        assert tuple(vocabulary.encode(f" {vocabulary.decode(segment.tokens)}")) == segment.tokens
    for text in ("naïve Łódź", "東京 🎧", "Quilter's"):
        assert vocabulary.decode(vocabulary.encode(f" {text}")) == text


def test_a_vocabulary_without_rules_is_written_in_as_few_pieces_as_there_can_be(tmp_path: Path):
    pieces = ["", "▁", "a", "d", "▁ad", "da", "<unk>", "b", "'"]
    (tmp_path / "pieces.json").write_text(json.dumps(pieces))
    vocabulary = SentencePieceTokenizer(tmp_path / "pieces.json")
    assert [pieces[each] for each in vocabulary.encode(" ada")] == ["▁ad", "a"]
    assert [pieces[each] for each in vocabulary.encode("Ada-b'd")] == ["a", "da", "▁", "b", "'", "d"]
    assert vocabulary.encode("axe") == vocabulary.encode("<unk>") == []
    assert [first_unencodable_letter(vocabulary, word) for word in ("Ada", "ADA da", "A.D.", "Adam", "東")] == [
        "",
        "",
        "",
        "m",
        "東",
    ]
    client: Any = SimpleNamespace(card=asr_card("armspeech-hy"))
    with pytest.raises(OptionError, match=r"hotword 'ադ' has 'ա'. the vocabulary of armspeech-hy has no such letter"):
        hotword_bias(client, vocabulary, ["ադ"])
