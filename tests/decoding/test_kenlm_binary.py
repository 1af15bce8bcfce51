"""KenLM's binary files: the same log-probabilities as KenLM's own, and files that cannot be read."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from asr_serve.decoding.language_model import kenlm_binary
from asr_serve.decoding.language_model.arpa import read_arpa
from asr_serve.decoding.language_model.kenlm_binary import is_kenlm_binary, read_kenlm_binary
from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
from asr_serve.decoding.language_model.ngram_tables import WordNgrams
from asr_serve.errors import WeightsCorrupt

FIXTURE = dict(np.load(Path(__file__).parent / "fixtures" / "kenlm.npz"))
SENTENCES: list[list[str]] = json.loads(FIXTURE["header"].tobytes())["sentences"]
FILES = [name.removesuffix(".log10") for name in FIXTURE if name.endswith(".log10")]


def written(folder: Path, name: str, data: bytes | None = None) -> Path:
    path = folder / name
    path.write_bytes(FIXTURE[name].tobytes() if data is None else data)
    return path


def log10_of(ngrams: WordNgrams) -> list[float]:
    """Log-probability of each word and each end of the sentences, in base 10, one query after another."""
    model, ids, found = ngrams.model, {word: index for index, word in enumerate(ngrams.words)}, []
    for sentence in SENTENCES:
        state = model.start_state
        for word in sentence:
            logprob, state = model.step(state, ids.get(word, ids["<unk>"]))
            found.append(logprob)
        found.append(float(model.final_logprobs[state]))
    return [each / math.log(10) for each in found]


@pytest.mark.parametrize("name", FILES)
def test_scores_are_kenlms(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name)
    assert is_kenlm_binary(path)
    assert log10_of(read_kenlm_binary(path)) == pytest.approx(FIXTURE[f"{name}.log10"].tolist(), abs=1e-5, rel=1e-6)


@pytest.mark.parametrize("name", ["bigrams.trie", "trigrams.probing", "holes.compressed_trie"])
def test_batched_scores_are_kenlms(tmp_path: Path, name: str) -> None:
    ngrams = read_kenlm_binary(written(tmp_path, name))
    scorer, ids = NgramScorer(ngrams.model), {word: index for index, word in enumerate(ngrams.words)}
    states = torch.full((len(SENTENCES),), scorer.initial_state)
    found = [list[float]() for _ in SENTENCES]
    for position in range(max(map(len, SENTENCES)) + 1):
        ends = scorer.final_logprobs(states)
        tokens = [ids.get((*each, *[""] * 20)[position], ids["<unk>"]) for each in SENTENCES]
        logprobs, states = scorer.score(states, torch.tensor(tokens))
        for row, sentence in enumerate(SENTENCES):
            if position <= len(sentence):
                found[row].append(float(logprobs[row] if position < len(sentence) else ends[row]) / math.log(10))
    expected = FIXTURE[f"{name}.log10"].tolist()
    assert [score for row in found for score in row] == pytest.approx(expected, abs=1e-5, rel=1e-6)


@pytest.mark.parametrize("name", ["bigrams", "trigrams"])
def test_the_arpa_file_has_the_same_scores(tmp_path: Path, name: str) -> None:
    ngrams = read_arpa(written(tmp_path, f"{name}.arpa"))
    expected = FIXTURE[f"{name}.trie.log10"].tolist()
    assert log10_of(ngrams) == pytest.approx(expected, abs=1e-5, rel=1e-6)


@pytest.mark.parametrize("name", ["trigrams.probing", "trigrams.trie", "holes.quantized_compressed_trie"])
def test_every_ngram_is_found_again(tmp_path: Path, name: str) -> None:
    ngrams = read_kenlm_binary(written(tmp_path, name))
    assert set(ngrams.words) == {"<unk>", *(f"w{number}" for number in range(40)), "Ärger", "日本"}
    if name.startswith("trigrams"):
        assert len(ngrams.model.arc_words) == len(read_arpa(written(tmp_path, "trigrams.arpa")).model.arc_words)


def test_a_probing_table_that_takes_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kenlm_binary, "MAX_HASHED_NGRAMS", 1_000)
    with pytest.raises(WeightsCorrupt, match=r"probing hash table of 45 words.*build_binary trie"):
        read_kenlm_binary(written(tmp_path, "trigrams.probing"))


def test_pairs_are_hashed_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_kenlm_binary(written(tmp_path, "holes.probing"))
    monkeypatch.setattr(kenlm_binary, "_HASHED_AT_ONCE", 50)
    assert log10_of(read_kenlm_binary(written(tmp_path, "holes.probing"))) == log10_of(whole)


SANITY_BYTES = 88


@pytest.mark.parametrize(
    ("start", "new", "problem"),
    [
        (50, b"4", "another version"),
        (0, b"mmap lm http://kheafield.com/code incomplete\n", "not written to its end"),
        (60, b"\x3f\x80", "another byte order"),
        (SANITY_BYTES, b"\x01", "of order 1"),
        (SANITY_BYTES + 8, b"\x09", "of kind 9"),
        (SANITY_BYTES + 16, b"\x07", "trie of version 7"),
        (SANITY_BYTES + 24, b"\xff" * 8, "broken header"),
        (SANITY_BYTES + 20, b"\x10", "is broken"),
    ],
)
def test_broken_headers_are_refused(tmp_path: Path, start: int, new: bytes, problem: str) -> None:
    data = bytearray(FIXTURE["trigrams.trie"].tobytes())
    data[start : start + len(new)] = new
    with pytest.raises(WeightsCorrupt, match=problem):
        read_kenlm_binary(written(tmp_path, "broken", bytes(data)))


def test_a_file_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsCorrupt, match="built without its words"):
        read_kenlm_binary(written(tmp_path, "bigrams.without_words"))


@pytest.mark.parametrize("name", ["trigrams.trie", "trigrams.probing", "trigrams.quantized_compressed_trie"])
def test_files_cut_or_changed_anywhere_are_read_or_refused(tmp_path: Path, name: str) -> None:
    whole, drawn = FIXTURE[name].tobytes(), np.random.default_rng(0)
    for cut in drawn.integers(0, len(whole), 40):
        with pytest.raises(WeightsCorrupt):
            read_kenlm_binary(written(tmp_path, "cut", whole[:cut]))
    for at in drawn.integers(SANITY_BYTES, len(whole), 60):
        changed = bytearray(whole)
        changed[at] ^= 0xA5
        with contextlib.suppress(WeightsCorrupt):  # any other error fails the test
            read_kenlm_binary(written(tmp_path, "changed", bytes(changed)))
