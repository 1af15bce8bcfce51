"""Language models fitted to a recogniser's tokens."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch

from asr_serve.decoding.language_model.arpa import read_arpa
from asr_serve.decoding.language_model.kneser_ney import train
from asr_serve.decoding.language_model.ngram_tables import WordNgrams
from asr_serve.decoding.language_model.token_models import choose_language_model, load_token_models
from asr_serve.errors import UnsupportedOption, WeightsCorrupt, WeightsMissing
from asr_serve.types import LanguageModelChoice

NAMES = ["<token:0>", "▁a", "▁b", "c", "▁never", "d"]
TEXT = [("▁a", "c", "▁b"), ("▁b", "▁a", "c"), ("▁a", "▁b"), ("c",)]


def ngrams() -> WordNgrams:
    return train(TEXT, 3).to_model()


def test_tokens_have_the_probabilities_of_their_names() -> None:
    words = ngrams()
    model = words.for_tokens(NAMES)
    model.validate()
    state, other = model.start_state, words.model.start_state
    for name in ("▁a", "c", "▁b"):
        logprob, state = model.step(state, NAMES.index(name))
        expected, other = words.model.step(other, words.words.index(name))
        assert (logprob, state) == (expected, other)
    assert model.final_logprobs[state] == words.model.final_logprobs[other]


def test_tokens_that_the_model_lacks_are_its_unknown_word() -> None:
    words = ngrams()
    model, unknown = words.for_tokens(NAMES), words.unknown
    assert unknown is not None
    for state in range(model.states):
        for name in ("<token:0>", "▁never", "d"):
            logprob, after = model.step(state, NAMES.index(name))
            assert logprob == pytest.approx(words.model.step(state, unknown)[0], abs=1e-6)
            assert after == 0


def test_tokens_are_possible_where_the_model_has_no_unknown_word(tmp_path: Path) -> None:
    (tmp_path / "tiny.arpa").write_text(
        "\\data\\\nngram 1=4\n\n\\1-grams:\n-99 <s>\n-0.3 ▁a\n-0.9 c\n-0.5 </s>\n\n\\end\\\n", encoding="utf-8"
    )
    model = read_arpa(tmp_path / "tiny.arpa").for_tokens(NAMES)
    for name in ("<token:0>", "▁b", "c"):
        assert model.step(0, NAMES.index(name))[0] == pytest.approx(-0.9 * math.log(10), abs=1e-6)


def test_models_of_these_tokens_are_loaded_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sentences = {"fits": TEXT, "words": [("hello", "world")], "empty": [()]}
    paths = {name: str(tmp_path / f"{name}.ngram.safetensors") for name in sentences}
    for name, text in sentences.items():
        train(text, 2).to_model().save(Path(paths[name]))
    with caplog.at_level(logging.WARNING):
        found = load_token_models(paths, NAMES, torch.device("cpu"))
    assert list(found) == ["fits"]
    assert "words" in caplog.text
    assert "--tokens" in caplog.text
    scorer = found["fits"].scorer
    logprobs, _ = scorer.score(torch.tensor([scorer.initial_state] * 6), torch.arange(6))
    assert logprobs.isfinite().all()
    with pytest.raises(WeightsMissing, match=r"no language model .*absent"):
        load_token_models({"x": str(tmp_path / "absent.arpa")}, NAMES, torch.device("cpu"))
    (tmp_path / "broken.arpa").write_text("nothing")
    with pytest.raises(WeightsCorrupt, match="data"):
        load_token_models({"x": str(tmp_path / "broken.arpa")}, NAMES, torch.device("cpu"))


def test_words_are_no_tokens_although_a_recogniser_has_tokens_that_are_spelled_alike(tmp_path: Path) -> None:
    path = tmp_path / "words.ngram.safetensors"
    train([("the", "cat"), ("cat", "s")], 2).to_model().save(path)
    for mark in ("▁", "Ġ"):
        names = [f"{mark}the", "the", f"{mark}cat", "cat", "s"]
        assert load_token_models({"x": str(path)}, names, torch.device("cpu")) == {}
    assert load_token_models({"x": str(path)}, ["the", "cat", "s"], torch.device("cpu")).keys() == {"x"}


def test_a_graph_of_words_takes_models_of_words_alone(tmp_path: Path) -> None:
    sentences = {"few": [("the", "cat")], "many": [tuple("abcdefgh"), ("the", "cat")], "tokens": [("▁the", "▁cat")]}
    paths = {name: str(tmp_path / f"{name}.ngram.safetensors") for name in [*sentences, "others"]}
    for name, text in (sentences | {"others": [("hello", "world")]}).items():
        train(text, 2).to_model().save(Path(paths[name]))
    graph = ["<eps>", "▁the", "▁cat", "▁sat"]
    found = load_token_models(paths, graph, torch.device("cpu"), of_words=True)
    assert found.keys() == {"few", "many"}
    own = train(sentences["few"], 2).to_model()
    logprob, _ = found["few"].scorer.model.step(found["few"].scorer.initial_state, 2)
    assert logprob == pytest.approx(own.model.step(own.model.start_state, own.words.index("cat"))[0])


def test_a_choice_tells_the_model_and_its_weight(tmp_path: Path) -> None:
    for name, order in (("one", 2), ("other", 3)):
        train(TEXT, order).to_model().save(tmp_path / f"{name}.ngram.safetensors")
    paths = {name: str(tmp_path / f"{name}.ngram.safetensors") for name in ("one", "other")}
    loaded = load_token_models(paths, NAMES, torch.device("cpu"))
    choices = [LanguageModelChoice(name, weight) for name in paths for weight in (0.1, 0.2)]
    chosen = [choose_language_model(loaded, choice) for choice in choices]
    assert all(each is not None for each in chosen)
    assert [each.fusion.weight for each in chosen if each] == [0.1, 0.2, 0.1, 0.2]
    assert len({each.digest for each in chosen if each}) == 4
    assert choose_language_model(loaded, None) is None
    with pytest.raises(UnsupportedOption, match="one, other"):
        choose_language_model(loaded, LanguageModelChoice("third", 0.1))
