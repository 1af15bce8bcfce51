"""Writes fixtures/wfst.safetensors: what Kaldi's decoders find in small random graphs, and the graphs as OpenFst's
binary files.

The graphs have a start, loops, epsilon arcs and words; the posteriors are random. `FasterDecoder` gives the best path
under beam and max_active, `LatticeSimpleDecoder` the lattice, whose best word sequences are listed.

    pip install kaldifst==1.8.3 kaldi-decoder==0.3.2 pynini==2.1.7 safetensors numpy
    python tests/decoding/generate_wfst.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import kaldi_decoder
import kaldifst
import numpy as np
import pynini
from safetensors.numpy import save_file

FIXTURE = Path(__file__).parent / "fixtures" / "wfst.safetensors"
CASES, STATES, COLUMNS, WORDS, FRAMES = 12, 30, 9, 15, 40
SETTINGS = {"wide": (1000.0, 1 << 30, 0), "beam": (6.0, 1 << 30, 20), "active": (8.0, 25, 5)}
"""beam, max_active, min_active."""
LATTICE_BEAM, LISTED = 5.0, 5


def text_of_graph(rng: np.random.Generator) -> str:
    """A graph in OpenFst's text format; epsilon arcs lead to greater states, so there is no loop of them."""
    lines = []
    for state in range(STATES):
        targets = rng.integers(STATES, size=rng.integers(2, 5)).tolist()
        arcs = [(int(rng.integers(1, COLUMNS + 1)), to) for to in (state, *targets)]
        arcs += [(0, int(rng.integers(state + 1, STATES)))] if state + 1 < STATES and rng.random() < 0.3 else []
        for label, to in arcs:
            word = int(rng.integers(1, WORDS + 1)) if rng.random() < 0.3 else 0
            lines.append(f"{state} {to} {label} {word} {rng.uniform(0, 2):.6f}")
        if rng.random() < 0.5 or state == STATES - 1:
            lines.append(f"{state} {rng.uniform(0, 1):.6f}")
    return "\n".join(lines) + "\n"


def best_path(decoder: Any, scores: np.ndarray) -> tuple[list[int], float]:
    decoder.decode(kaldi_decoder.DecodableCtc(scores))
    ok, path = decoder.get_best_path()
    assert ok
    _, _, words, weight = kaldifst.get_linear_symbol_sequence(path)
    return list(words), weight.value1 + weight.value2


def listed(graph: Any, scores: np.ndarray) -> list[tuple[list[int], float]]:
    """Word sequences of the lattice, best first."""
    config = kaldi_decoder.LatticeSimpleDecoderConfig(
        beam=1000.0, lattice_beam=LATTICE_BEAM, determinize_lattice=False, prune_interval=1000
    )
    decoder = kaldi_decoder.LatticeSimpleDecoder(graph, config)
    decoder.decode(kaldi_decoder.DecodableCtc(scores))
    ok, lattice = decoder.get_raw_lattice()
    assert ok
    found: dict[tuple[int, ...], float] = {}
    for path in kaldifst.convert_nbest_to_vector(kaldifst.shortest_path(lattice, 4000)):
        _, _, words, weight = kaldifst.get_linear_symbol_sequence(path)
        cost = weight.value1 + weight.value2
        found[tuple(words)] = min(cost, found.get(tuple(words), np.inf))
    return [(list(words), cost) for words, cost in sorted(found.items(), key=lambda item: item[1])[:LISTED]]


def as_bytes(path: Path) -> np.ndarray:
    return np.frombuffer(path.read_bytes(), np.uint8)


def write_files(text: str, folder: Path) -> dict[str, np.ndarray]:
    """The graph as files of three programs' making; arcs as a table."""
    made = kaldifst.compile(text, fst_type="vector")
    made.write(str(folder / "vector.fst"))
    kaldifst.compile(text, fst_type="const").write(str(folder / "const.fst"))
    named = pynini.Fst.read(str(folder / "vector.fst"))
    symbols = pynini.SymbolTable("words")
    symbols.add_symbol("<eps>", 0)
    for word in range(1, WORDS + 1):
        symbols.add_symbol(f"wörd{word}", word)
    named.set_output_symbols(symbols)
    named.write(str(folder / "named.fst"))
    arcs = [(s, a.nextstate, a.ilabel, a.olabel) for s in named.states() for a in named.arcs(s)]
    costs = [float(a.weight) for s in named.states() for a in named.arcs(s)]
    finals = [float(named.final(s)) for s in named.states()]
    return {name: as_bytes(folder / f"{name}.fst") for name in ("vector", "const", "named")} | {
        "arcs": np.array(arcs, np.int32),
        "costs": np.array(costs, np.float32),
        "finals": np.array(finals, np.float32),
    }


def main() -> None:
    tensors: dict[str, np.ndarray] = {}
    expected: list[dict[str, Any]] = []
    for case in range(CASES):
        rng = np.random.default_rng(case)
        text = text_of_graph(rng)
        scores = np.log(rng.dirichlet(np.full(COLUMNS, 0.4), FRAMES)).clip(-12).astype(np.float32)
        with tempfile.TemporaryDirectory() as folder:
            tensors |= {f"{case}.{name}": array for name, array in write_files(text, Path(folder)).items()}
            graph = kaldifst.StdVectorFst.read(str(Path(folder) / "vector.fst"))
            found: dict[str, Any] = {"start": graph.start}
            for name, (beam, most, least) in SETTINGS.items():
                options = kaldi_decoder.FasterDecoderOptions(beam=beam, max_active=most, min_active=least)
                found[name] = best_path(kaldi_decoder.FasterDecoder(graph, options), scores)
            found["list"] = listed(graph, scores)
        tensors[f"{case}.scores"] = scores
        expected.append(found)
    save_file(tensors, FIXTURE, {"expected": json.dumps(expected), "settings": json.dumps(SETTINGS)})


if __name__ == "__main__":
    main()
