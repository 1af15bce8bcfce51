"""Readers of OpenFst's files: what OpenFst and pynini wrote is read back; damaged files are refused with a place."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors import safe_open

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.checkpoints import openfst_files
from asr_serve.models.checkpoints.openfst_files import make_decoding_graph, read_ngram, read_transducer

FIXTURE = Path(__file__).parents[1] / "decoding" / "fixtures" / "wfst.safetensors"


class Case(NamedTuple):
    start: int
    files: dict[str, bytes]
    arcs: np.ndarray
    costs: np.ndarray
    finals: np.ndarray


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    with safe_open(FIXTURE, "np") as file:
        expected = json.loads(file.metadata()["expected"])
        return [
            Case(
                found["start"],
                {name: file.get_tensor(f"{i}.{name}").tobytes() for name in ("vector", "const", "named")},
                *(file.get_tensor(f"{i}.{name}") for name in ("arcs", "costs", "finals")),
            )
            for i, found in enumerate(expected)
        ]


def written(folder: Path, data: bytes) -> Path:
    path = folder / "graph.fst"
    path.write_bytes(data)
    return path


def looking_ahead(const: bytes) -> bytes:
    """A file of type olabel_lookahead: its header, the graph, and tables that nobody reads."""
    outer = struct.pack("<i", openfst_files.FST_MAGIC) + named("olabel_lookahead") + named("standard")
    outer += struct.pack("<iiQqqq", 1, 0, 0, 0, -1, 0)
    return outer + struct.pack("<i", openfst_files.ADD_ON_MAGIC) + const + b"\1tables of reachable labels"


def named(text: str) -> bytes:
    return struct.pack("<i", len(text.encode())) + text.encode()


@pytest.mark.parametrize("kind", ["vector", "const", "named", "olabel_lookahead"])
def test_what_openfst_wrote_is_read(cases, tmp_path, kind):
    for case in cases:
        data = looking_ahead(case.files["const"]) if kind == "olabel_lookahead" else case.files[kind]
        found = read_transducer(written(tmp_path, data))
        sources = np.repeat(np.arange(len(found.final_costs)), np.diff(found.offsets))
        arcs = np.stack([sources, found.arcs["state"], found.arcs["input"], found.arcs["output"]], axis=1)
        np.testing.assert_array_equal(arcs, case.arcs)
        np.testing.assert_array_equal(found.arcs["cost"], case.costs)
        np.testing.assert_array_equal(found.final_costs, case.finals)
        assert found.start_state == case.start
        assert (found.output_symbols or {}).get(3) == ("wörd3" if kind == "named" else None)


def test_aligned_const_files_are_read(cases, tmp_path):
    case = cases[0]
    data = case.files["const"]
    reader = openfst_files._Reader(written(tmp_path, data))
    reader.header(("const",))
    states = len(case.finals) * openfst_files.CONST_STATE.itemsize
    flags = data.index(b"standard") + len("standard") + 4
    header = data[:flags] + struct.pack("<i", openfst_files.IS_ALIGNED) + data[flags + 4 : reader.offset]
    body = data[reader.offset :]
    first = header + b"\0" * (-len(header) % 16) + body[:states]
    aligned = first + b"\0" * (-len(first) % 16) + body[states:]
    np.testing.assert_array_equal(read_transducer(written(tmp_path, aligned)).arcs["cost"], case.costs)


@pytest.mark.parametrize("kind", ["vector", "const", "named"])
def test_files_that_end_early_are_refused_with_a_place(cases, tmp_path, kind):
    data = cases[1].files[kind]
    for size in range(0, len(data) - 1, 7):
        if kind == "vector" and size > 70 and not is_known_length(data):
            continue
        with pytest.raises(WeightsCorrupt, match=r"graph\.fst, byte \d+"):
            read_transducer(written(tmp_path, data[:size]))


def is_known_length(data: bytes) -> bool:
    """Returns whether the header tells the number of states."""
    at = data.index(b"standard") + len("standard") + 24
    return struct.unpack_from("<q", data, at)[0] >= 0


def test_flipped_bits_are_refused_or_read_but_nothing_else(cases, tmp_path):
    rng = np.random.default_rng(0)
    for kind, _ in itertools.product(("vector", "const", "named"), range(150)):
        data = bytearray(cases[2].files[kind])
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        try:
            found = read_transducer(written(tmp_path, bytes(data)))
        except WeightsCorrupt:
            continue
        assert found.offsets[-1] == len(found.arcs)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file ends"),
        (b"RIFF....", "a transducer begins with"),
        (struct.pack("<i", openfst_files.FST_MAGIC) + named("compact_string") + named("standard"), "compact_string"),
        (struct.pack("<i", openfst_files.FST_MAGIC) + named("vector") + named("log"), "arcs of type 'log'"),
    ],
)
def test_other_files_are_refused(tmp_path, data, message):
    with pytest.raises(WeightsCorrupt, match=message):
        read_transducer(written(tmp_path, data))
    with pytest.raises(WeightsCorrupt):
        read_ngram(written(tmp_path, data))
    with pytest.raises(WeightsCorrupt, match="cannot be read"):
        read_transducer(tmp_path / "absent.fst")


def test_a_decoding_graph_names_labels_without_a_column(cases, tmp_path):
    transducer = read_transducer(written(tmp_path, cases[0].files["const"]))
    graph = make_decoding_graph(transducer, np.arange(-1, 9).clip(0).astype(np.int32))
    assert len(graph.arc_costs) == len(cases[0].costs)
    highest = int(transducer.arcs["input"].max())
    with pytest.raises(WeightsCorrupt, match=f"input labels 1 to {highest}"):
        make_decoding_graph(transducer, np.zeros(highest, np.int32))
    silent = make_decoding_graph(transducer, np.zeros(highest, np.int32), silent_labels=[highest])
    assert (silent.arc_labels < 0).sum() == np.isin(transducer.arcs["input"], [0, highest]).sum()


# --- n-gram models ----------------------------------------------------------------------------------------


class Model(NamedTuple):
    """Trigram model in dictionaries of contexts, the most recent word last; costs."""

    futures: dict[tuple[int, ...], dict[int, float]]
    backoffs: dict[tuple[int, ...], float]
    finals: dict[tuple[int, ...], float]


def random_model(seed: int, words: int = 7) -> Model:
    rng = np.random.default_rng(seed)
    contexts: list[tuple[int, ...]] = [(), (0,)]
    contexts += [(w,) for w in range(1, words) if rng.random() < 0.8]
    contexts += [
        (v, *c) for c in contexts[1:] for v in range(1, words) if c != (0,) and (v,) in contexts and rng.random() < 0.4
    ]
    futures = {c: {int(w): float(rng.uniform(0, 5)) for w in sample(rng, words, not c)} for c in contexts}
    for context in contexts[1:]:  # a context is an n-gram of the context without its last word
        futures[context[:-1]].setdefault(context[-1], 1.5)
    backoffs = {c: float(rng.uniform(0, 2)) for c in contexts if c}
    finals = {c: float(rng.uniform(0, 5)) for c in contexts if not c or rng.random() < 0.3}
    return Model(futures, backoffs, finals)


def sample(rng: np.random.Generator, words: int, all_of_them: bool) -> list[int]:
    return [w for w in range(1, words) if all_of_them or rng.random() < 0.5]


def ngram_file(model: Model) -> bytes:
    """An ngram file, from Sorensen and Allauzen's description: contexts in breadth-first order as a LOUDS tree."""
    order: list[tuple[int, ...]] = [()]
    bits = [True, False]
    for context in order:
        children = sorted(c for c in model.futures if len(c) == len(context) + 1 and c[1:] == context)
        order += children
        bits += [True] * len(children) + [False]
    futures = [sorted(model.futures[c].items()) for c in order]
    future_bits = [False, *itertools.chain(*([True] * len(f) + [False] for f in futures))]
    flat = list(itertools.chain(*futures))
    finals = [model.finals[c] for c in order if c in model.finals]
    head = struct.pack("<i", openfst_files.FST_MAGIC) + named("ngram") + named("standard")
    symbols = struct.pack("<i", openfst_files.SYMBOLS_MAGIC) + named("words") + struct.pack("<qq", 9, 2)
    symbols += named("<eps>") + struct.pack("<q", 0) + named("ü") + struct.pack("<q", 1)
    body = struct.pack("<QQQ", len(order), len(flat), len(finals))
    body += packed(bits) + packed(future_bits) + packed([c in model.finals for c in order])
    body += np.array([-1, *(c[0] for c in order[1:]), 0], "<i4").tobytes()
    body += np.array([w for w, _ in flat], "<i4").tobytes()
    body += np.array([0, *(model.backoffs[c] for c in order[1:]), 0], "<f4").tobytes()
    body += np.array(finals, "<f4").tobytes() + np.array([cost for _, cost in flat] + [0], "<f4").tobytes()
    return head + struct.pack("<iiQqqq", 4, 1, 0, 1, len(order), 0) + symbols + body


def packed(bits: list[bool]) -> bytes:
    filled = bits + [False] * (-len(bits) % 64)
    return np.packbits(np.array(filled), bitorder="little").tobytes()


def after(model: Model, context: tuple[int, ...], word: int) -> tuple[float, tuple[int, ...]]:
    cost, at = 0.0, context
    while word not in model.futures[at]:
        cost, at = cost + model.backoffs[at], at[1:]
    longest = (*context, word)
    while longest not in model.futures:
        longest = longest[1:]
    return cost + model.futures[at][word], longest


@pytest.mark.parametrize("seed", range(12))
def test_an_ngram_file_is_the_model_that_was_written(tmp_path, seed):
    model = random_model(seed)
    acceptor = read_ngram(written(tmp_path, ngram_file(model)))
    found = acceptor.model
    assert acceptor.symbols == {0: "<eps>", 1: "ü"}
    rng = np.random.default_rng(seed)
    for _ in range(30):
        context, state = (0,), found.start_state
        for word in rng.integers(1, 7, 8).tolist():
            cost, context = after(model, context, word)
            logprob, state = found.step(state, word)
            assert -logprob == pytest.approx(cost, abs=1e-5)
            final, at = 0.0, context
            while at not in model.finals:
                final, at = final + model.backoffs[at], at[1:]
            assert -found.final_logprobs[state] == pytest.approx(final + model.finals[at], abs=1e-5)


def test_damaged_ngram_files_are_refused_or_read_but_nothing_else(tmp_path):
    data = ngram_file(random_model(3))
    for size in range(0, len(data) - 4, 11):
        with pytest.raises(WeightsCorrupt, match=r"graph\.fst"):
            read_ngram(written(tmp_path, data[:size]))
    rng = np.random.default_rng(0)
    for _ in range(400):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] ^= 1 << rng.integers(8)
        try:
            found = read_ngram(written(tmp_path, bytes(damaged))).model
        except WeightsCorrupt:
            continue
        found.validate()
