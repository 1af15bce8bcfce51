"""N-gram models: training against the formulas, files, and queries of many hypotheses at once."""

from __future__ import annotations

import gzip
import io
import itertools
import math
import random
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.decoding.language_model.arpa import read_arpa, write_arpa
from asr_serve.decoding.language_model.kneser_ney import FALLBACK_DISCOUNTS, TrainedNgrams, perplexity, train
from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
from asr_serve.decoding.language_model.ngram_tables import WordNgrams
from asr_serve.errors import OptionError, WeightsCorrupt

Sentence = tuple[str, ...]


def corpus(seed: int, sentences: int = 60, words: str = "abcdef") -> list[Sentence]:
    """Sentences in which some words follow others more often."""
    drawn = random.Random(seed)
    text = []
    for _ in range(sentences):
        sentence, last = [], drawn.choice(words)
        for _ in range(drawn.randint(0, 7)):
            sentence.append(last)
            last = drawn.choice(words) if drawn.random() < 0.4 else words[(words.index(last) + 1) % len(words)]
        text.append(tuple(sentence))
    return text


def logprob_of(ngrams: WordNgrams, context: Sentence, word: str) -> float:
    """Log-probability of a word, or of the end, after a sentence that begins so."""
    model, state = ngrams.model, ngrams.model.start_state
    for each in context:
        state = model.step(state, ngrams.words.index(each))[1]
    return float(model.final_logprobs[state]) if word == "</s>" else model.step(state, ngrams.words.index(word))[0]


class Formulas:
    """Interpolated modified Kneser-Ney, word by word from the paper's formulas."""

    def __init__(self, text: list[Sentence], order: int, discounts: list[tuple[float, float, float]]) -> None:
        self.order, self.discounts = order, discounts
        raw = [Counter[Sentence]() for _ in range(order + 1)]
        before: list[dict[Sentence, set[str]]] = [defaultdict(set) for _ in range(order + 1)]
        for sentence in text:
            padded = ("<s>", *sentence, "</s>")
            for n in range(1, order + 1):
                for at in range(len(padded) - n + 1):
                    raw[n][padded[at : at + n]] += 1
                    if at:
                        before[n][padded[at : at + n]].add(padded[at - 1])
        self.counts = [
            {g: c if n == order or g[0] == "<s>" else len(before[n][g]) for g, c in raw[n].items()}
            for n in range(order + 1)
        ]
        self.vocabulary = {word for sentence in text for word in sentence} | {"</s>", "<unk>"}

    def discount(self, n: int, count: int) -> float:
        return 0.0 if not count else self.discounts[n - 1][min(count, 3) - 1]

    def probability(self, context: Sentence, word: str) -> float:
        n = len(context) + 1
        follows = {g[-1]: c for g, c in self.counts[n].items() if g[:-1] == context and g[-1] != "<s>"}
        total = sum(follows.values())
        lower = 1 / len(self.vocabulary) if n == 1 else self.probability(context[1:], word)
        if not total:
            return lower
        left = sum(self.discount(n, count) for count in follows.values()) / total
        count = follows.get(word, 0)
        return (count - self.discount(n, count)) / total + left * lower


@pytest.mark.parametrize(("seed", "order"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_training_is_the_papers(seed: int, order: int) -> None:
    text = corpus(seed)
    trained = train(text, order)
    ngrams, formulas = trained.to_model(), Formulas(text, order, trained.discounts)
    words = sorted(formulas.vocabulary)
    for length in range(4):
        for context in itertools.islice(itertools.product(sorted(set(words) - {"</s>"}), repeat=length), 0, 200, 7):
            history = ("<s>", *context)[-(order - 1) :] if order > 1 else ()
            for word in words:
                expected = formulas.probability(history, word)
                assert math.exp(logprob_of(ngrams, context, word)) == pytest.approx(expected, rel=1e-5), (context, word)


@pytest.mark.parametrize("prune", [(), (0, 0, 1), (0, 1), (0, 2, 3)])
def test_probabilities_sum_to_one_in_every_context(prune: tuple[int, ...]) -> None:
    ngrams = train(corpus(5, 200), 3, prune).to_model()
    scorer, count = NgramScorer(ngrams.model), len(ngrams.words)
    states = torch.arange(ngrams.model.states)[:, None].expand(-1, count)
    logprobs, _ = scorer.score(states, torch.arange(count).expand_as(states))
    sums = logprobs.exp().sum(1) + scorer.final_logprobs(states[:, 0]).exp()
    assert sums.tolist() == pytest.approx([1.0] * len(sums), abs=1e-6)


def test_discounts_are_estimated_where_the_text_allows() -> None:
    text = corpus(6, 3_000, "abcdefghijklmnop")
    padded = [("<s>", *sentence, "</s>") for sentence in text]
    seen = Counter(each[at : at + 3] for each in padded for at in range(len(each) - 2))
    t = [sum(count == k for count in seen.values()) for k in range(5)]
    share = t[1] / (t[1] + 2 * t[2])
    expected = [k - (k + 1) * share * t[k + 1] / t[k] for k in (1, 2, 3)]
    assert train(text, 3).discounts[2] == pytest.approx(expected)
    assert train([("a",)], 2).discounts == [FALLBACK_DISCOUNTS] * 2


def test_pruning_leaves_out_rare_ngrams() -> None:
    text = corpus(7, 100)
    sizes = [[len(table.words) for table in train(text, 3, prune).tables] for prune in ((), (0, 0, 1), (0, 1))]
    assert sizes[0][:2] == sizes[1][:2]
    assert sizes[0][2] > sizes[1][2]
    assert sizes[1][1] > sizes[2][1]
    assert sizes[0][0] == sizes[2][0]


def test_words_outside_a_closed_vocabulary_are_unknown() -> None:
    ngrams = train([("a", "b"), ("a", "c")], 2, vocabulary=["a", "b"]).to_model()
    assert ngrams.words == ("<unk>", "a", "b")
    assert logprob_of(ngrams, ("a",), "<unk>") == pytest.approx(logprob_of(ngrams, ("a",), "b"))


@pytest.mark.parametrize(
    ("sentences", "options", "param"),
    [
        ([("a",)], {"order": 0}, "order"),
        ([("a",)], {"order": 9}, "order"),
        ([("a",)], {"prune": (1,)}, "prune"),
        ([("a",)], {"prune": (0, 2, 1)}, "prune"),
        ([], {}, "text"),
        ([("a", "<s>")], {}, "text"),
    ],
)
def test_wrong_training_is_refused(sentences: list[Sentence], options: dict[str, object], param: str) -> None:
    with pytest.raises(OptionError) as refused:
        train(sentences, **options)
    assert refused.value.param == param


def test_perplexity_is_that_of_the_words() -> None:
    ngrams = train(corpus(8), 2).to_model()
    text = [("a", "b"), ("never", "c")]
    total = logprob_of(ngrams, (), "a") + logprob_of(ngrams, ("a",), "b") + logprob_of(ngrams, ("a", "b"), "</s>")
    total += logprob_of(ngrams, ("<unk>",), "c") + logprob_of(ngrams, ("<unk>", "c"), "</s>")
    found = perplexity(ngrams, text)
    assert found.perplexity == pytest.approx(math.exp(-total / 5))
    assert (found.words, found.unknown) == (4, 1)
    assert math.isnan(perplexity(ngrams, []).perplexity)


# --- queries ----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), order=st.integers(1, 4), prune=st.sampled_from([(), (0, 0, 1)]))
def test_batched_queries_are_single_ones(seed: int, order: int, prune: tuple[int, ...]) -> None:
    ngrams = train(corpus(seed, 30), order, prune).to_model()
    model, scorer, drawn = ngrams.model, NgramScorer(ngrams.model), random.Random(seed)
    states = torch.tensor([[drawn.randrange(model.states) for _ in range(7)] for _ in range(5)])
    words = torch.tensor([[drawn.randrange(-1, len(ngrams.words) + 2) for _ in range(7)] for _ in range(5)])
    logprobs, after = scorer.score(states, words)
    expected = [model.step(int(s), int(w)) for s, w in zip(states.flatten(), words.flatten(), strict=True)]
    assert logprobs.flatten().tolist() == pytest.approx([each[0] for each in expected], abs=1e-6)
    assert after.flatten().tolist() == [each[1] for each in expected]


def test_another_vocabulary_has_the_same_probabilities() -> None:
    ngrams = train(corpus(9), 3).to_model()
    ids = {word: 3 * index for index, word in enumerate(reversed(ngrams.words)) if word != "c"}
    model = ngrams.reindexed(ids)
    model.validate()
    for state in range(model.states):
        for word, index in ids.items():
            assert model.step(state, index) == ngrams.model.step(state, ngrams.words.index(word))
    assert model.step(0, 3 * ngrams.words[::-1].index("c"))[0] == -math.inf


def test_a_recognisers_tokens_that_the_model_lacks_are_unknown_words() -> None:
    ngrams = train(corpus(12), 3).to_model()
    names = ["<token:0>", "f", "c", "a", "\u2581new", "e", "b", "d"]
    model = ngrams.for_tokens(names)
    model.validate()
    unknown = ngrams.model.step(0, ngrams.words.index("<unk>"))[0]
    for state in range(model.states):
        for token, name in enumerate(names):
            if name in ngrams.words:
                assert model.step(state, token) == ngrams.model.step(state, ngrams.words.index(name))
            elif state == 0:
                assert model.step(state, token) == (pytest.approx(unknown), 0)
    assert ngrams.share_of(names) == 1.0
    assert ngrams.share_of(["a", "b", "c", "x"]) == 0.5


def test_nothing_is_impossible_in_a_search(tmp_path: Path) -> None:
    """Without <unk>, with a word that never comes, and without an end."""
    text = TINY.replace("-0.6\tb", "-99\tb").replace("-0.9\t</s>", "-99\t</s>")
    (tmp_path / "tiny.arpa").write_text(text)
    ngrams = read_arpa(tmp_path / "tiny.arpa")
    assert ngrams.model.final_logprobs[0] == -math.inf
    model = ngrams.for_tokens(["a", "b", "other"])
    assert [model.step(0, token)[0] for token in range(3)] == pytest.approx(
        [-0.3 * math.log(10), -23.0, -0.3 * math.log(10)]
    )
    assert np.isfinite(model.final_logprobs).all()


# --- files ------------------------------------------------------------------------------------------------


def arpa_text(trained: TrainedNgrams) -> str:
    file = io.StringIO()
    write_arpa(trained.tables, trained.words, file)
    return file.getvalue()


@pytest.mark.parametrize("suffix", [".arpa", ".arpa.gz"])
@pytest.mark.parametrize("prune", [(), (0, 1, 1)])
def test_a_model_comes_back_from_its_arpa_file(tmp_path: Path, suffix: str, prune: tuple[int, ...]) -> None:
    trained = train(corpus(10), 3, prune)
    path = tmp_path / f"model{suffix}"
    path.write_bytes(
        gzip.compress(arpa_text(trained).encode()) if suffix == ".arpa.gz" else arpa_text(trained).encode()
    )
    ours, again = trained.to_model(), read_arpa(path)
    assert again.words == tuple(trained.words[i - 2] for i in trained.tables[0].words[:, 0] if i >= 2)
    for context in [(), ("a",), ("a", "b"), ("c", "c"), ("f", "a", "b")]:
        for word in [*again.words, "</s>"]:
            assert logprob_of(again, context, word) == pytest.approx(logprob_of(ours, context, word), abs=1e-5)


def test_a_model_comes_back_from_its_own_file(tmp_path: Path) -> None:
    ours = train(corpus(11), 3).to_model()
    ours.save(tmp_path / "a.ngram.safetensors")
    again = WordNgrams.load(tmp_path / "a.ngram.safetensors")
    assert again.words == ours.words
    assert logprob_of(again, ("a", "b"), "c") == logprob_of(ours, ("a", "b"), "c")
    (tmp_path / "a.ngram.safetensors").write_bytes(b"{}")
    with pytest.raises(WeightsCorrupt, match="lm build"):
        WordNgrams.load(tmp_path / "a.ngram.safetensors")


TINY = """\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-99\t<s>\t-0.5
-0.3\ta\t-0.25
-0.6\tb
-0.9\t</s>

\\2-grams:
-0.1\t<s> a
-0.2\ta b

\\end\\
"""


def test_probabilities_are_those_written(tmp_path: Path) -> None:
    (tmp_path / "tiny.arpa").write_text(TINY)
    ngrams = read_arpa(tmp_path / "tiny.arpa")
    log10 = {
        ((), "a"): -0.1,
        ((), "b"): -0.5 - 0.6,
        ((), "</s>"): -0.5 - 0.9,
        (("a",), "b"): -0.2,
        (("a",), "a"): -0.25 - 0.3,
        (("a",), "</s>"): -0.25 - 0.9,
        (("b",), "a"): -0.3,
        (("a", "b"), "b"): -0.6,
    }
    for (context, word), expected in log10.items():
        assert logprob_of(ngrams, context, word) / math.log(10) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("\\data\\", "", r"no \\data"),
        ("ngram 2=2", "ngram 3=2", "ngram 2=COUNT"),
        ("ngram 2=2", "ngram 2=3", "2 2-grams, where the header counts 3"),
        ("-0.6\tb", "-0.6", "is no 1-gram"),
        ("-0.6\tb", "x\tb", "no numbers"),
        ("-0.6\tb", "0.6\tb", "0 or less"),
        ("-0.6\tb", "nan\tb", "0 or less"),
        ("a b", "a z", "'z' has no 1-gram"),
        ("-0.2\ta b", "-0.1\t<s> a", "comes twice"),
        ("\\2-grams:", "\\3-grams:", "2-grams: belongs"),
        ("\\end\\", "", "the end"),
    ],
)
def test_broken_files_are_refused_with_their_line(tmp_path: Path, old: str, new: str, problem: str) -> None:
    (tmp_path / "broken.arpa").write_text(TINY.replace(old, new))
    with pytest.raises(WeightsCorrupt, match=problem):
        read_arpa(tmp_path / "broken.arpa")


@pytest.mark.parametrize("data", [b"\xff\xfe", b"\x1f\x8b broken"])
def test_files_that_are_no_text_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / ("a.arpa.gz" if data.startswith(b"\x1f") else "a.arpa")
    path.write_bytes(data)
    with pytest.raises(WeightsCorrupt, match="UTF-8"):
        read_arpa(path)
