"""The gate of the edge: what it leaves out of telephone calls, and which words it changes.

    python bench/edge_gate.py --data DIR --speakers 2033,2414,2609 --json edge-gate.json

A call is one side of a conversation: one person's clips in turns, and silence where the other one speaks; 8 kHz, noise
on the line, G.711. The text of its live segments is compared with that of the same call behind the gate, for each
variant of the gate. What that is worth, two other comparisons tell: the same call with its noise drawn once more, and
the same call 10 ms later. README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import clips
import machine
import numpy as np
import soxr
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import asr_serve
from asr_serve.audio.endpointing import WINDOW_SAMPLES, EndpointConfig, Endpointer
from asr_serve.audio.silence_schedule import STREAMING_SCHEDULE
from asr_serve.audio.stream_decoder import MAX_SILENT_SAMPLES, create_live_decoder
from asr_serve.edge.speech_gate import GateConfig, GatedSpeech
from asr_serve.edge.voice_activity import VoiceActivityPool
from asr_serve.models.auxiliary import silero
from asr_serve.pipelines.options import MAX_LIVE_SEGMENT_MS
from asr_serve_tools.evaluate.wer import normalize, wer

RATE_HZ, TELEPHONE_HZ = 16_000, 8_000
LATER_SAMPLES = 160
BATCH = 64


class Variant(NamedTuple):
    config: GateConfig
    noise: bool
    """Whether the engine hears the line's noise where the gate sent a count; otherwise zeros."""


def _variant(pre_roll_ms: int, hangover_ms: int, lead_ms: int, noise: bool) -> tuple[str, Variant]:
    config = GateConfig(pre_roll_ms=pre_roll_ms, hangover_ms=hangover_ms, lead_ms=lead_ms)
    return f"{pre_roll_ms} + {hangover_ms} ms, {'noise' if noise else 'zeros'}", Variant(config, noise)


VARIANTS = dict(
    (
        _variant(320, 480, 0, noise=False),
        _variant(320, 480, 512, noise=True),
        _variant(640, 960, 0, noise=False),
        _variant(640, 960, 512, noise=True),
        _variant(640, 2_000, 0, noise=False),
        _variant(640, 2_000, 512, noise=True),
    )
)
"""By pre-roll and hangover."""


def to_int16(audio: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(audio * 32_767), -32_768, 32_767).astype(np.int16)


def telephone(audio: np.ndarray, noise_dbfs: float | None, rng: np.random.Generator) -> np.ndarray:
    """The audio as a call has it: 8 kHz, noise on the line, G.711 u-law; then int16 at 16 kHz again."""
    narrow = soxr.resample(audio, RATE_HZ, TELEPHONE_HZ)
    if noise_dbfs is not None:
        narrow = narrow + 10 ** (noise_dbfs / 20) * rng.standard_normal(len(narrow))
    # u-law as its continuous formula, in 255 steps
    mu = 255.0
    coded = np.sign(narrow) * np.log1p(mu * np.minimum(1.0, np.abs(narrow))) / np.log1p(mu)
    coded = np.round(coded * 127) / 127
    decoded = np.sign(coded) * np.expm1(np.abs(coded) * np.log1p(mu)) / mu
    return to_int16(soxr.resample(decoded, TELEPHONE_HZ, RATE_HZ))


def one_side(speech: Sequence[np.ndarray], duty: float, rng: np.random.Generator) -> np.ndarray:
    """Clips in turns of one to three, with breaths in between; and between turns the silence that gives that share of
    speech."""
    total = sum(map(len, speech))
    silence = total * (1 / duty - 1)
    ends = np.cumsum(rng.integers(1, 4, len(speech)))
    turn_starts = {0, *(int(end) for end in ends if end < len(speech))}
    breaths = rng.uniform(0.3, 1.2, len(speech)) * RATE_HZ
    rest = silence - sum(breaths[n] for n in range(len(speech)) if n not in turn_starts)
    turns = iter(rng.dirichlet(np.full(len(turn_starts) + 1, 4.0)) * rest)
    parts = []
    for number, clip in enumerate(speech):
        parts += [np.zeros(int(next(turns) if number in turn_starts else breaths[number]), np.float32), clip]
    return np.concatenate([*parts, np.zeros(int(next(turns)), np.float32)])


def runs_of(pcm: np.ndarray, pool: VoiceActivityPool, config: GateConfig) -> list[tuple[bool, int]]:
    """What the gate makes of a call: (whether sent, samples) of each run."""
    with pool.open(config) as caller:
        outputs = [output for at in range(0, len(pcm), RATE_HZ) for output in caller.feed(pcm[at : at + RATE_HZ])]
        outputs += caller.finish()
    runs = []
    for sent, group in itertools.groupby(outputs, lambda output: isinstance(output, GatedSpeech)):
        runs.append((sent, sum(len(one.samples) if isinstance(one, GatedSpeech) else one.count for one in group)))
    assert sum(count for _, count in runs) == len(pcm), "samples in are not samples out"
    return runs


def behind_gate(pcm: np.ndarray, runs: Sequence[tuple[bool, int]], noise: bool) -> np.ndarray:
    """The call as an engine behind the gate hears it: by the decoder of the server's sessions."""
    decoder = create_live_decoder("s16le", RATE_HZ)
    parts, at = [], 0
    for sent, count in runs:
        if sent:
            parts.append(decoder.decode(pcm[at : at + count].tobytes()))
        else:
            pieces = range(0, count, MAX_SILENT_SAMPLES)
            parts += [decoder.decode_silence(min(MAX_SILENT_SAMPLES, count - done), noise=noise) for done in pieces]
        at += count
    return (np.concatenate(parts) * 32_768).astype(np.int16)


class Listener:
    """Final segments of live transcripts: voice activity and endpointing as in a live session, and each segment
    recognized as a whole. Segments are recognized all at once, and each once."""

    def __init__(self) -> None:
        self._texts, self._voice = dict[bytes, str](), silero.load()
        self._endpoint = EndpointConfig(max_segment_ms=MAX_LIVE_SEGMENT_MS, schedule=STREAMING_SCHEDULE)

    def segments(self, pcm: np.ndarray) -> list[bytes]:
        """Samples of the segments of a call."""
        count = -(-len(pcm) // WINDOW_SAMPLES)
        windows = np.pad(pcm, (0, count * WINDOW_SAMPLES - len(pcm))).astype(np.float32)[None] / 32_768
        found, _ = self._voice.step(torch.from_numpy(windows), self._voice.state(1), torch.tensor([count]))
        endpointer = Endpointer(self._endpoint)
        spans = [*endpointer.append_probabilities(found[0].numpy()), *endpointer.finish(len(pcm))]
        segments = [pcm[span.start_samples : span.end_samples].tobytes() for span in spans]
        self._texts.update(dict.fromkeys(set(segments) - set(self._texts), ""))
        return segments

    def recognize(self, model_name: str) -> None:
        keys = sorted(self._texts, key=len)
        with asr_serve.load(model_name) as model:
            for start in range(0, len(keys), BATCH):
                batch = keys[start : start + BATCH]
                audio = [np.frombuffer(key, np.int16).astype(np.float32) / 32_768 for key in batch]
                found = model.transcribe(audio, vad=False)
                self._texts.update(zip(batch, (each.text for each in found), strict=True))
                print(f"{start + len(batch)} of {len(keys)} segments", file=sys.stderr, flush=True)

    def words(self, segments: Sequence[bytes]) -> list[str]:
        """Normalized words."""
        return normalize(" ".join(self._texts[segment] for segment in segments)).split()


def changes(before: Sequence[str], after: Sequence[str]) -> list[str]:
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [
        f"{' '.join(before[a:b]) or '-'} > {' '.join(after[c:d]) or '-'}"
        for kind, a, b, c, d in matcher.get_opcodes()
        if kind != "equal"
    ]


def changed_words(differ: Sequence[str]) -> int:
    return sum(max(len(side.split()) if side != "-" else 0 for side in each.split(" > ")) for each in differ)


class Heard(NamedTuple):
    name: str
    about: dict[str, Any]
    reference: str
    segments: list[bytes]


def compare(heard: Heard, plain: Heard, listener: Listener) -> dict[str, Any]:
    before, after = listener.words(plain.segments), listener.words(heard.segments)
    differ = changes(before, after)
    return {
        "name": heard.name,
        **heard.about,
        "segments": len(plain.segments),
        "segments_equal": len(set(plain.segments) & set(heard.segments)),
        "words": len(before),
        "words_changed": changed_words(differ),
        "wer": round(wer([heard.reference], [" ".join(after)]).percent, 2),
        "changes": differ,
    }


def total(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each comparison, over all calls and for each noise."""
    found = []
    for noise in (*dict.fromkeys(row["noise_dbfs"] for row in rows), "all"):
        for name in dict.fromkeys(row["name"] for row in rows):
            mine = [row for row in rows if row["name"] == name and noise in ("all", row["noise_dbfs"])]
            if mine:
                count = sum(row["reference_words"] for row in mine)
                found.append(
                    {
                        "name": f"{name}; noise {noise}",
                        "calls": len(mine),
                        "segments": sum(row["segments"] for row in mine),
                        "segments_equal": sum(row["segments_equal"] for row in mine),
                        "words": sum(row["words"] for row in mine),
                        "words_changed": sum(row["words_changed"] for row in mine),
                        "wer": round(sum(row["wer"] * row["reference_words"] for row in mine) / count, 2),
                    }
                )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with transcripts.tsv; a folder for each speaker"
    )
    parser.add_argument(
        "--speakers", required=True, help="folders of speakers, like 2033,2414: one side of a call each"
    )
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--noises", default="none,-60,-45", help="noise on the line, dBFS")
    parser.add_argument("--duties", default="0.6,0.4,0.2", help="shares of speech")
    parser.add_argument("--transcribed", default="0.6,0.4", help="the duties that are transcribed")
    parser.add_argument("--variants", help="names of variants, separated by semicolons (default: all)")
    parser.add_argument("--model", default="moonshine-tiny-en")
    args = parser.parse_args()
    names = list(VARIANTS) if args.variants is None else [name.strip() for name in args.variants.split(";")]
    if unknown := set(names) - set(VARIANTS):
        parser.error(f"variants {sorted(unknown)}; known: {sorted(VARIANTS)}")
    torch.set_num_threads(1)
    facts = machine.describe(threads=1, packages=("wasmtime",))
    pairs = clips.read_transcripts(args.data)
    pool = VoiceActivityPool()
    noises = [None if each == "none" else float(each) for each in args.noises.split(",")]
    transcribed = {float(each) for each in args.transcribed.split(",") if each != "none"}
    listener, shares = Listener(), []
    calls: list[list[Heard]] = []
    """The call without a gate first."""
    for duty, noise, (number, speaker) in itertools.product(
        map(float, args.duties.split(",")), noises, enumerate(args.speakers.split(","))
    ):
        spoken = [(path, text) for path, text in pairs if path.split("/")[0] == speaker]
        if not spoken:
            parser.error(f"no clip of the speaker {speaker} in {args.data}")
        clean = one_side(
            [clips.decode(args.data / path) for path, _ in spoken], duty, np.random.default_rng([7, number])
        )
        pcm = telephone(clean, noise, np.random.default_rng([8, number]))
        reference = normalize(" ".join(text for _, text in spoken))
        about = {
            "speaker": speaker,
            "duty": duty,
            "noise_dbfs": noise,
            "call_s": round(len(pcm) / RATE_HZ, 1),
            "reference_words": len(reference.split()),
        }
        runs = {config: runs_of(pcm, pool, config) for config in {VARIANTS[name].config for name in names}}
        for name in names:
            sent = sum(count for speech, count in runs[VARIANTS[name].config] if speech)
            shares.append({"name": name, **about, "dropped_share": round(1 - sent / len(pcm), 4)})
        if duty not in transcribed:
            continue
        heard = {"no gate": pcm, "no gate, 10 ms later": np.concatenate([np.zeros(LATER_SAMPLES, np.int16), pcm])}
        if noise is not None:
            heard["no gate, other noise"] = telephone(clean, noise, np.random.default_rng([9, number]))
        for name in names:
            heard[name] = behind_gate(pcm, runs[VARIANTS[name].config], VARIANTS[name].noise)
        calls.append([Heard(name, about, reference, listener.segments(each)) for name, each in heard.items()])
        print(about, file=sys.stderr, flush=True)
    listener.recognize(args.model)
    rows = [compare(heard, call[0], listener) for call in calls for heard in call]
    dropped = [
        {
            "name": f"{name}; duty {duty:g}",
            "dropped_share": round(
                sum(row["dropped_share"] * row["call_s"] for row in mine) / sum(row["call_s"] for row in mine), 4
            ),
        }
        for name in names
        for duty in dict.fromkeys(row["duty"] for row in shares)
        if (mine := [row for row in shares if row["name"] == name and row["duty"] == duty])
    ]
    report = {"bench": "edge_gate", "machine": facts, "model": args.model, "speakers": args.speakers}
    machine.tell(args.json, {**report, "totals": total(rows), "dropped": dropped, "rows": rows, "shares": shares})
    return 0


if __name__ == "__main__":
    sys.exit(main())
