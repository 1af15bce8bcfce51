"""Who speaks when: diarization error, what it costs, and words by speaker.

Scored by pyannote.metrics without a collar, overlaps included, on `ami` (10 excerpts of meetings of 30 s, and one
file that holds nothing) and `two-speaker-mixes` (16 mixes of two readers), beside

one speaker     everything that voice activity finds is one person's
sherpa-onnx     OfflineSpeakerDiarization: the same segmentation network, ERes2Net as ONNX, fast clustering
sherpa-onnx, our pauses     the same, whose turns go on over pauses of 0.3 s, as ours do, in place of its 0.5 s
ours, its pauses            ours, whose turns go on over pauses of 0.5 s: as sherpa-onnx comes
resemblyzer     its encoder over windows of 1.5 s where somebody speaks, spectral clustering by spectralcluster

    python bench/rich_speakers.py --data DIR --model moonshine-tiny-en --json speakers.json
    python bench/rich_speakers.py --data DIR --develop          the meetings on which numbers were chosen

Parts that a file of --json has and that are not run again stay in it. Peers that are not installed are left out,
and said so. rich.py runs this beside the other parts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import clips
import machine
import meetings
import numpy as np

import asr_serve
from asr_serve.api.library import Model
from asr_serve.config import EngineConfig
from asr_serve.diarization import diarize
from asr_serve.diarization.windowing import CLOSE_SAMPLES
from asr_serve.models.auxiliary import silero
from asr_serve.pipelines.offline import overlap_recognizer
from asr_serve.types import SpeakerTurn, Transcript
from asr_serve.units import RATE_HZ

Row = dict[str, Any]
Hear = Callable[[np.ndarray], Sequence[SpeakerTurn]]

SHERPA_PAUSE_S = 0.5
"""sherpa-onnx's own default."""


class Case(NamedTuple):
    name: str
    pcm: np.ndarray
    turns: tuple[SpeakerTurn, ...]


def rttm(path: Path) -> dict[str, list[SpeakerTurn]]:
    """Turns of each recording."""
    found: dict[str, list[SpeakerTurn]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if fields and fields[0] == "SPEAKER":
            start, end = float(fields[3]), float(fields[3]) + float(fields[4])
            turn = SpeakerTurn(fields[7], round(start * RATE_HZ), round(end * RATE_HZ))
            found.setdefault(fields[1], []).append(turn)
    return found


def ami(folder: Path) -> list[Case]:
    turns = rttm(folder / "debug.train.rttm")
    names = sorted(path.stem for path in folder.glob("*.flac"))
    return [Case(name, clips.decode(folder / f"{name}.flac"), tuple(turns.get(name, []))) for name in names]


def mixes(folder: Path) -> list[Case]:
    return [
        Case(path.stem, clips.decode(path), tuple(next(iter(rttm(path.with_suffix(".rttm")).values()))))
        for path in sorted(folder.glob("*.flac"))
    ]


def score(cases: Iterable[Case], hear: Hear) -> Row:
    """Percent of the time in which somebody speaks."""
    from pyannote.core import Annotation, Segment, Timeline
    from pyannote.metrics.diarization import DiarizationErrorRate

    def annotation(turns: Iterable[SpeakerTurn]) -> Any:
        found = Annotation()
        for number, turn in enumerate(turns):
            where = Segment(turn.start_samples / RATE_HZ, turn.end_samples / RATE_HZ)
            found[where, number] = turn.speaker
        return found

    metric = DiarizationErrorRate(collar=0.0, skip_overlap=False)
    counted, seconds, spent = [], 0.0, 0.0
    for case in cases:
        started = time.perf_counter()
        heard = tuple(hear(case.pcm)) if len(case.pcm) else ()
        spent += time.perf_counter() - started
        seconds += len(case.pcm) / RATE_HZ
        whole = Timeline([Segment(0, len(case.pcm) / RATE_HZ)])
        metric(annotation(case.turns), annotation(heard), uem=whole)
        counted.append(len({turn.speaker for turn in heard}) - len({turn.speaker for turn in case.turns}))
    parts = metric[:]
    total = parts["total"]
    return {
        "der": round(100 * abs(metric), 2),
        "missed": round(100 * parts["missed detection"] / total, 2),
        "false_alarm": round(100 * parts["false alarm"] / total, 2),
        "confusion": round(100 * parts["confusion"] / total, 2),
        "speakers_right": f"{sum(not each for each in counted)} of {len(counted)}",
        "speed": round(seconds / spent, 1),
    }


# --- those that are compared ------------------------------------------------------------------------------


def ours(model: Model, **options: Any) -> Hear:
    def hear(pcm: np.ndarray) -> Sequence[SpeakerTurn]:
        found = model.transcribe([pcm], speakers=True, **options)
        return found[0].turns

    return hear


def over_pauses(hear: Hear, pause_s: float) -> Hear:
    """A turn goes on over pauses of the same speaker up to that."""

    def joined(pcm: np.ndarray) -> Sequence[SpeakerTurn]:
        found: dict[str, list[SpeakerTurn]] = {}
        for turn in sorted(hear(pcm), key=lambda each: each.start_samples):
            own = found.setdefault(turn.speaker, [])
            if own and turn.start_samples - own[-1].end_samples <= pause_s * RATE_HZ:
                turn = SpeakerTurn(turn.speaker, own.pop().start_samples, turn.end_samples)
            own.append(turn)
        return [turn for own in found.values() for turn in own]

    return joined


def one_speaker() -> Hear:
    vad = silero.load()
    return lambda pcm: [SpeakerTurn("all", start, end) for start, end in meetings.spoken(vad, pcm)]


def sherpa(folder: Path, pause_s: float = SHERPA_PAUSE_S) -> Hear:
    """`folder`: for the network that is exported; pause_s: turns go on over shorter ones."""
    import sherpa_onnx

    config = sherpa_onnx.OfflineSpeakerDiarizationConfig(
        segmentation=sherpa_onnx.OfflineSpeakerSegmentationModelConfig(
            pyannote=sherpa_onnx.OfflineSpeakerSegmentationPyannoteModelConfig(model=str(_segmentation(folder))),
            num_threads=2,
        ),
        embedding=sherpa_onnx.SpeakerEmbeddingExtractorConfig(model=str(_exported(folder)), num_threads=2),
        clustering=sherpa_onnx.FastClusteringConfig(num_clusters=-1, threshold=0.5),
        min_duration_off=pause_s,
    )
    made = sherpa_onnx.OfflineSpeakerDiarization(config)

    def hear(pcm: np.ndarray) -> Sequence[SpeakerTurn]:
        return [
            SpeakerTurn(str(each.speaker), round(each.start * RATE_HZ), round(each.end * RATE_HZ))
            for each in made.process(pcm).sort_by_start_time()
        ]

    return hear


def _segmentation(folder: Path) -> Path:
    """The graph, with what sherpa-onnx wants to be told of it."""
    import onnx

    from asr_serve.models.auxiliary import pyannote
    from asr_serve.models.checkpoints import store

    graph = onnx.load(str(store.verified_published_folder(pyannote.CARDS[0]) / pyannote.GRAPH))
    told = {
        "num_speakers": 3,
        "powerset_max_classes": 2,
        "num_classes": 7,
        "sample_rate": RATE_HZ,
        "window_size": 160_000,
        "receptive_field_size": pyannote.FIELD_SAMPLES,
        "receptive_field_shift": pyannote.STEP_SAMPLES,
    }
    return _with(graph, told, folder / "segmentation.onnx", {"input": "x", "output": "y"})


def _exported(folder: Path) -> Path:
    import onnx
    import torch

    from asr_serve.models.auxiliary import eres2net

    path = folder / "voices.onnx"
    torch.onnx.export(
        eres2net.read(_voices()),
        (torch.zeros(1, 200, 80),),
        str(path),
        input_names=["x"],
        output_names=["embedding"],
        dynamic_axes={"x": {0: "rows", 1: "frames"}, "embedding": {0: "rows"}},
        opset_version=17,
        dynamo=False,
    )
    told = {
        "framework": "3d-speaker",
        "language": "English",
        "sample_rate": RATE_HZ,
        "output_dim": eres2net.WIDTH,
        "feature_normalize_type": "global-mean",
        "normalize_samples": 1,
        "comment": "ERes2Net, VoxCeleb",
        "url": "none",
    }
    return _with(onnx.load(str(path)), told, path, {})


def _voices() -> Path:
    from asr_serve.models.auxiliary import eres2net
    from asr_serve.models.checkpoints import store

    return store.verified_published_folder(eres2net.CARDS[0])


def _with(graph: Any, told: dict[str, Any], path: Path, renamed: dict[str, str]) -> Path:
    import onnx

    for key, value in told.items():
        entry = graph.metadata_props.add()
        entry.key, entry.value = key, str(value)
    for node in graph.graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = renamed.get(name, name)
    for values in (graph.graph.input, graph.graph.output):
        for value in values:
            value.name = renamed.get(value.name, value.name)
    onnx.save(graph, str(path))
    return path


def resemblyzer() -> Hear:
    from spectralcluster import FallbackOptions, SpectralClusterer

    from asr_serve.models.auxiliary import ge2e

    vad, encoder = silero.load(), ge2e.load()
    few = FallbackOptions(spectral_min_embeddings=5)  # of fewer it makes no graph, and clusters them one by one
    window, step = int(1.5 * RATE_HZ), int(0.75 * RATE_HZ)

    def hear(pcm: np.ndarray) -> Sequence[SpeakerTurn]:
        places = [
            (at, min(at + window, end))
            for start, end in meetings.spoken(vad, pcm)
            for at in range(start, max(start + 1, end - step), step)
        ]
        if len(places) < 2:
            return [SpeakerTurn("0", start, end) for start, end in places]
        level = [pcm[a:b] * (ge2e.LEVEL / max(1e-6, float(np.sqrt(np.square(pcm[a:b]).mean())))) for a, b in places]
        voices = np.stack([encoder.embed(each) for each in level])
        labels = SpectralClusterer(min_clusters=1, max_clusters=8, fallback_options=few).predict(voices)
        return [SpeakerTurn(str(who), a, min(b, a + step)) for (a, b), who in zip(places, labels, strict=True)]

    return hear


# --- cost, and words by speaker ---------------------------------------------------------------------------


def cost(model: Model, recording: np.ndarray, rounds: int = 5) -> Row:
    """How much slower a recording is heard with its speakers: medians of rounds in turn. The engine keeps
    nothing."""
    seconds = len(recording) / RATE_HZ
    spent: dict[bool, list[float]] = {False: [], True: []}
    model.transcribe([recording[: 60 * RATE_HZ]], speakers=True)
    for _ in range(rounds):
        for speakers in spent:
            started = time.perf_counter()
            model.transcribe([recording], words=True, speakers=speakers)
            spent[speakers].append(time.perf_counter() - started)
    without, beside = (float(np.median(spent[each])) for each in (False, True))
    return {
        "audio_s": round(seconds),
        "speed": round(seconds / without, 1),
        "speed_with_speakers": round(seconds / beside, 1),
        "slower_by": round(1 - without / beside, 3),
    }


def cpwer(model: Model, folder: Path) -> Row:
    """Word error rate by speaker, each speaker's words in one row, of the best match of speakers (meeteval): with
    overlapped turns recognised apart, and with one transcript of them, as before."""
    with mock.patch.object(overlap_recognizer, "overlapped_speech", return_value=None):
        before = _cpwer(model, folder)
    after = _cpwer(model, folder)
    return {
        "cpwer": after[0],
        "as_one_speaker": after[1],
        "one_transcript": {"cpwer": before[0], "as_one_speaker": before[1]},
    }


def _cpwer(model: Model, folder: Path) -> tuple[float, float]:
    """Percent by speaker, and if all words are one speaker's."""
    from meeteval.wer.wer.cp import cp_word_error_rate as measure
    from whisper_normalizer.english import EnglishTextNormalizer

    normal = EnglishTextNormalizer()
    wrong = length = alone = 0
    for path in sorted(folder.glob("*.flac")):
        told = json.loads(path.with_suffix(".seglst.json").read_text(encoding="utf-8"))
        reference: dict[str, str] = {}
        for each in told:
            reference[each["speaker"]] = f"{reference.get(each['speaker'], '')} {normal(each['words'])}".strip()
        found: Transcript = model.transcribe([clips.decode(path)], speakers=True)[0]
        heard: dict[str, str] = {}
        for segment in found.segments:
            heard[segment.speaker] = f"{heard.get(segment.speaker, '')} {normal(segment.text)}".strip()
        by_speaker = measure(reference, heard or {"nobody": ""}, False, False)
        wrong, length = wrong + by_speaker.errors, length + by_speaker.length
        alone += measure(reference, {"all": " ".join(heard.values())}, False, False).errors
    return round(100 * wrong / length, 2), round(100 * alone / length, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="moonshine-tiny-en")
    parser.add_argument("--develop", action="store_true")
    parser.add_argument("--parts", default="der,peers,cost,cpwer")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    parts = asked.parts.split(",")
    found: Row = {"machine": machine.describe(machine.cores()), "model": asked.model}
    with asr_serve.load(asked.model, engine=EngineConfig(prefix_bytes=0)) as model:
        if asked.develop:
            for kind in meetings.KINDS:
                made = meetings.meetings(asked.data, 12, kinds=(kind,))
                found[kind] = score((Case(each.name, each.pcm, each.turns) for each in made), ours(model))
                print(kind, found[kind], flush=True)
        else:
            found |= evaluate(model, asked.data, parts)
    if asked.json and asked.json.exists():  # of other parts, or of these before
        found = json.loads(asked.json.read_text(encoding="utf-8")) | found
    machine.write(asked.json, found)


def evaluate(model: Model, data: Path, parts: Sequence[str]) -> Row:
    found: Row = {}
    sets = {"ami": ami(data / "ami"), "two-speaker-mixes": mixes(data / "two-speaker-mixes")}
    with tempfile.TemporaryDirectory() as folder:
        systems: dict[str, Callable[[], Hear]] = {}
        if "der" in parts:
            systems |= {"ours": lambda: ours(model), "one speaker": one_speaker}
        if "peers" in parts:
            systems |= {
                "ours, its pauses": lambda: over_pauses(ours(model), SHERPA_PAUSE_S),
                "sherpa-onnx": lambda: sherpa(Path(folder)),
                "sherpa-onnx, our pauses": lambda: sherpa(Path(folder), diarize.PAUSE_SAMPLES / RATE_HZ),
                "resemblyzer": resemblyzer,
            }
        needs = dict.fromkeys(("sherpa-onnx", "sherpa-onnx, our pauses"), "sherpa_onnx")
        needs["resemblyzer"] = "spectralcluster"
        for name, make in systems.items():
            if name in needs and importlib.util.find_spec(needs[name]) is None:
                print(f"{name}: left out, {needs[name]} is not installed")
                continue
            hear = make()
            for where, cases in sets.items():
                found[f"{name}, {where}"] = score(cases, hear)
                print(name, where, found[f"{name}, {where}"], flush=True)
    if "cpwer" in parts:
        found["cpwer"] = cpwer(model, data / "two-speaker-mixes")
        print("words by speaker", found["cpwer"], flush=True)
    if "cost" in parts:
        made = meetings.meetings(data, 8, kinds=("meeting",), people=60)
        recording = np.concatenate([each.pcm for each in made])
        for name, pcm in {"cost": recording, "cost, listened to closely": recording[: CLOSE_SAMPLES - RATE_HZ]}.items():
            found[name] = cost(model, pcm)
            print(name, found[name], flush=True)
    return found


if __name__ == "__main__":
    main()
