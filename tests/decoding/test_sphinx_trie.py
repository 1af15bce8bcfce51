"""CMU Sphinx's binary files: the same log-probabilities as PocketSphinx's own, and files that cannot be read."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

from asr_serve.decoding.language_model.ngram_files import read_ngrams
from asr_serve.decoding.language_model.sphinx_trie import read_sphinx_trie
from asr_serve.errors import WeightsCorrupt

FIXTURE = dict(np.load(Path(__file__).parent / "fixtures" / "sphinx_trie.npz"))
SENTENCES: list[list[str]] = json.loads(FIXTURE["header"].tobytes())["sentences"]
QUANTIZED_AT = 20 + 4 * 3
"""Byte of a trigram model that says how its weights are stored."""


def written(folder: Path, data: bytes) -> Path:
    path = folder / "model.lm.bin"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("order", ["2", "3", "4"])
def test_scores_are_pocketsphinxs(tmp_path: Path, order: str) -> None:
    ngrams = read_ngrams(written(tmp_path, FIXTURE[order].tobytes()))
    assert len(ngrams.counts) == int(order)
    assert {"w0", "Ärger", "日本"} <= set(ngrams.words)
    model, ids, found = ngrams.model, {word: index for index, word in enumerate(ngrams.words)}, []
    for sentence in SENTENCES:
        state = model.start_state
        for word in sentence:
            logprob, state = model.step(state, ids[word])
            found.append(logprob)
        found.append(float(model.final_logprobs[state]))
    # PocketSphinx rounds each of up to four weights to a whole power of 1.0001.
    assert found == pytest.approx(FIXTURE[f"{order}.logprobs"].tolist(), abs=4e-4)


@pytest.mark.parametrize(
    ("start", "new", "problem"),
    [(19, b"\x00", "order 0"), (19, b"\x20", "order 32"), (QUANTIZED_AT, b"\x00", "not quantized")],
)
def test_headers_of_other_files_are_refused(tmp_path: Path, start: int, new: bytes, problem: str) -> None:
    data = bytearray(FIXTURE["3"].tobytes())
    data[start : start + len(new)] = new
    with pytest.raises(WeightsCorrupt, match=problem):
        read_sphinx_trie(written(tmp_path, bytes(data)))


def test_files_cut_or_changed_anywhere_are_read_or_refused(tmp_path: Path) -> None:
    whole, drawn = FIXTURE["3"].tobytes(), np.random.default_rng(0)
    tables_end = QUANTIZED_AT + 4 + 3 * 4 * 65_536
    cuts, changes = (
        np.concatenate([drawn.integers(0, QUANTIZED_AT, 8), drawn.integers(tables_end, len(whole), count)])
        for count in (40, 60)
    )
    for cut in cuts:
        with pytest.raises(WeightsCorrupt):
            read_ngrams(written(tmp_path, whole[:cut]))
    for at in changes:
        changed = bytearray(whole)
        changed[at] ^= 0xA5
        with contextlib.suppress(WeightsCorrupt):  # any other error fails the test
            read_sphinx_trie(written(tmp_path, bytes(changed)))
