"""Voice activity alone, by threshold: speech that is left out, segments where nobody speaks, and when a pause is over.

    python bench/voice_activity.py --speech DIR --json voice-activity-cpu.json

--speech holds clips of read speech, all files or those in its transcripts.tsv. No recognizer runs. Speech is
where Silero finds it at one half in the clip as it is, with half a second of a quiet line before it and --after
seconds behind. Sounds without speech are those of no_speech.py, of another seed. Rows are of a condition, a network
and a threshold:

lost_s           speech outside the segments of a file, of speech_s
lost_stretches   of those the stretches of LOST_MS and more: a word, or several
not_ended        clips whose last segment is still open --after seconds later
late_ms          of the others: when that segment ended, after --silence-ms of pause; p50, p90 and mean
cut              segments that end where nobody was silent for so long
false_segments   in `minutes` of a sound without speech, with false_s in all

--networks names `16k`, the engine's, and `8k`: the half of silero-vad's model for 8 kHz, which we do not ship, on the
same audio at 8 kHz.

--thresholds is P, P:Q or P:Q:MS. Speech ends below Q, 0.7 P unless it is given, as the engine has it; with less than
MS of speech, clear or faint, an isolated segment needs clear speech; without it that is as the engine has it.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import clips
import machine
import no_speech
import numpy as np
import torch
from clips import RATE_HZ, Audio
from edge_vad import package_file
from offline import named
from segmentation import CONDITIONS

from asr_serve.audio.endpointing import WINDOW_SAMPLES, EndpointConfig, Endpointer
from asr_serve.audio.silence_schedule import OFFLINE_SCHEDULE, SilenceSchedule
from asr_serve.models.auxiliary import silero
from asr_serve.types import Span

Row = dict[str, Any]
BEFORE_S = 0.512
"""Line before a clip, whole windows."""
LINE_DB = -60.0
"""Level of its noise."""
LOST_MS = 200
BATCH = 64
MOST_MS = 30_000


class Threshold(NamedTuple):
    start: float
    end: float
    min_faint_speech_ms: int

    def __str__(self) -> str:
        return f"{self.start:g}:{self.end:g}:{self.min_faint_speech_ms}"


def on_a_line(audio: Audio, after_s: float) -> Audio:
    """The clip with a quiet line around it and under it, in whole windows."""
    before, after = round(BEFORE_S * RATE_HZ), round(after_s * RATE_HZ)
    after += -(len(audio) + after) % WINDOW_SAMPLES
    whole = np.concatenate([np.zeros(before), audio, np.zeros(after)])
    noise = np.random.default_rng(len(audio)).normal(0, 10 ** (LINE_DB / 20), len(whole))
    return np.asarray(whole + noise, np.float32)


def halved(audio: Audio) -> Audio:
    """The same at 8 kHz."""
    spectrum = np.fft.rfft(audio)[: len(audio) // 4 + 1]
    spectrum[-1] = 0
    return np.asarray(np.fft.irfft(spectrum, len(audio) // 2) / 2, np.float32)


def by_16k(batch: Sequence[Audio]) -> list[np.ndarray]:
    model = silero.load()
    counts = torch.tensor([len(audio) // WINDOW_SAMPLES for audio in batch])
    found, _ = model.step(torch.from_numpy(padded(batch)), model.state(len(batch)), counts)
    return [row[:count].numpy() for row, count in zip(found, counts, strict=True)]


def by_8k(batch: Sequence[Audio]) -> list[np.ndarray]:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        model = torch.jit.load(str(package_file("silero_vad.jit")))
    pcm = torch.from_numpy(padded([halved(audio) for audio in batch]))
    with torch.no_grad():
        found = torch.cat([model(window, RATE_HZ // 2) for window in pcm.split(WINDOW_SAMPLES // 2, 1)], 1).numpy()
    return [row[: len(audio) // WINDOW_SAMPLES] for row, audio in zip(found, batch, strict=True)]


def padded(batch: Sequence[Audio]) -> Audio:
    longest = max(map(len, batch))
    return np.stack([np.pad(audio, (0, longest - len(audio))) for audio in batch])


NETWORKS: dict[str, Callable[[Sequence[Audio]], list[np.ndarray]]] = {"16k": by_16k, "8k": by_8k}


def probabilities(network: str, audio: Sequence[Audio]) -> list[np.ndarray]:
    """Of each window of each clip; clips of about one length are a batch."""
    order = sorted(range(len(audio)), key=lambda index: len(audio[index]))
    found: dict[int, np.ndarray] = {}
    for at in range(0, len(order), BATCH):
        chosen = order[at : at + BATCH]
        found |= zip(chosen, NETWORKS[network]([audio[index] for index in chosen]), strict=True)
    return [found[index] for index in range(len(audio))]


def spans(scores: np.ndarray, threshold: Threshold, schedule: SilenceSchedule) -> Iterator[tuple[Span, int]]:
    """Each segment, and the audio that was known when it ended."""
    endpointer = Endpointer(
        EndpointConfig(
            threshold=threshold.start,
            neg_threshold=threshold.end,
            min_faint_speech_ms=threshold.min_faint_speech_ms,
            max_segment_ms=MOST_MS,
            schedule=schedule,
        )
    )
    for number in range(len(scores)):
        for span in endpointer.append_probabilities(scores[number : number + 1]):
            yield span, (number + 1) * WINDOW_SAMPLES
    for span in endpointer.finish(len(scores) * WINDOW_SAMPLES):
        yield span, sys.maxsize


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """First window and end of each run."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]


def left_out(speech: np.ndarray, scores: np.ndarray, threshold: Threshold) -> np.ndarray:
    """Windows with speech that lie in no segment of a file."""
    heard = np.zeros(len(speech), bool)
    for span, _ in spans(scores, threshold, OFFLINE_SCHEDULE):
        heard[span.start_samples // WINDOW_SAMPLES : -(-span.end_samples // WINDOW_SAMPLES)] = True
    return speech & ~heard


class Ends(NamedTuple):
    late_ms: float | None
    """Of the last segment; None: it has not ended."""
    cut: int


def ends(speech: np.ndarray, scores: np.ndarray, threshold: Threshold, silence_ms: int) -> Ends:
    """When segments end. `speech`: by window, of the clip as it is; some of it is speech."""
    silence = silence_ms / 1_000 * RATE_HZ / WINDOW_SAMPLES
    last = runs(speech)[-1][1]
    late, cut = None, 0
    for _, known in spans(scores, threshold, SilenceSchedule(((float("inf"), silence_ms),))):
        if known == sys.maxsize:
            late = None
            break
        at = known // WINDOW_SAMPLES
        late = (at - last - silence) * WINDOW_SAMPLES / RATE_HZ * 1_000
        before = np.flatnonzero(speech[:at])
        cut += int(len(before) > 0 and at < last and at - before[-1] - 1 < silence - 2)
    return Ends(late, cut)


def percentile(values: Sequence[float], share: float) -> int | None:
    return round(float(np.quantile(values, share))) if values else None


def of_speech(speech: Sequence[np.ndarray], scores: Sequence[np.ndarray], threshold: Threshold, silence_ms: int) -> Row:
    lost = [left_out(one, score, threshold) for one, score in zip(speech, scores, strict=True)]
    ended = [ends(one, score, threshold, silence_ms) for one, score in zip(speech, scores, strict=True)]
    late = [end.late_ms for end in ended if end.late_ms is not None]
    window_s = WINDOW_SAMPLES / RATE_HZ
    return {
        "clips": len(speech),
        "speech_s": round(sum(int(one.sum()) for one in speech) * window_s, 1),
        "lost_s": round(sum(int(one.sum()) for one in lost) * window_s, 1),
        "lost_stretches": sum((end - first) * 1_000 * window_s >= LOST_MS for one in lost for first, end in runs(one)),
        "not_ended": len(ended) - len(late),
        "late_p50_ms": percentile(late, 0.5),
        "late_p90_ms": percentile(late, 0.9),
        "late_mean_ms": round(float(np.mean(late))) if late else None,
        "cut": sum(end.cut for end in ended),
    }


def of_sound(scores: np.ndarray, threshold: Threshold) -> Row:
    found = [span for span, _ in spans(scores, threshold, OFFLINE_SCHEDULE)]
    return {
        "minutes": round(len(scores) * WINDOW_SAMPLES / RATE_HZ / 60, 1),
        "false_segments": len(found),
        "false_s": round(sum(span.samples for span in found) / RATE_HZ, 1),
    }


def thresholds(text: str) -> list[Threshold]:
    found = []
    for start, *rest in (each.split(":") for each in text.split(",")):
        end = float(rest[0]) if rest else round(0.7 * float(start), 3)
        found.append(Threshold(float(start), end, int(rest[1]) if rest[1:] else EndpointConfig().min_faint_speech_ms))
    return found


def rows(args: argparse.Namespace) -> Iterator[Row]:
    for folder in args.speech:
        load = clips.load if (folder / "transcripts.tsv").is_file() else clips.without_text
        heard = [on_a_line(clip.audio, args.after) for clip in load(folder, args.clips)]
        truth = [scores >= 0.5 for scores in probabilities("16k", heard)]
        known = [index for index, speech in enumerate(truth) if speech.any()]
        speech = [truth[index] for index in known]
        for condition in args.conditions:
            audio = [CONDITIONS[condition](heard[index]) for index in known]
            for network in args.networks:
                scores = probabilities(network, audio)
                for threshold in args.thresholds:
                    name = {"name": f"{condition} {network} {threshold}", "data": folder.name, "condition": condition}
                    found = of_speech(speech, scores, threshold, args.silence_ms)
                    yield name | {"network": network, "threshold": str(threshold)} | found
    for kind in args.kinds:
        sound = no_speech.made(kind, 60 * args.minutes, args.seed)
        sound = sound[: len(sound) // WINDOW_SAMPLES * WINDOW_SAMPLES]
        for condition in ("clean", "telephone"):
            audio = CONDITIONS[condition](sound) if sound.any() else sound
            for network in args.networks:
                [scores] = probabilities(network, [audio])
                for threshold in args.thresholds:
                    name = {"name": f"{kind} {condition} {network} {threshold}", "kind": kind, "condition": condition}
                    yield name | {"network": network, "threshold": str(threshold)} | of_sound(scores, threshold)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--speech", type=Path, action="append", default=[], metavar="DIR", help="folder of clips")
    add("--clips", type=int, metavar="N", help="of a folder at most (all)")
    add("--conditions", type=named(CONDITIONS), default=list(CONDITIONS), metavar="A,B", help=",".join(CONDITIONS))
    add("--networks", type=named(NETWORKS), default=["16k"], metavar="A,B", help=",".join(NETWORKS))
    add("--thresholds", type=thresholds, default=thresholds("0.5,0.4,0.3,0.2"), metavar="P,P:Q:MS")
    add("--silence-ms", type=int, default=500, metavar="MS", help="pause that ends a segment (500)")
    add("--after", type=float, default=3.0, metavar="S", help="line after each clip (3)")
    add("--kinds", type=named(no_speech.KINDS), default=list(no_speech.KINDS), metavar="A,B", help="sounds")
    add("--minutes", type=float, default=10.0, help="of each sound")
    add("--seed", type=int, default=100, help="of the sounds (100)")
    add("--json", type=Path, metavar="FILE", help="where the result goes")
    args = parser.parse_args(argv)
    found: Row = {"bench": "voice_activity", "machine": machine.describe(1, ["silero-vad"]), "rows": []}
    torch.set_num_threads(1)
    for row in rows(args):
        print(json.dumps(row), file=sys.stderr, flush=True)
        found["rows"].append(row)
    machine.tell(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
