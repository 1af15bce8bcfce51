"""What was heard before: how much sooner it is answered, and what remembering costs where nothing comes again.

    python bench/prefix.py --data DIR --json results/prefix-cpu.json

    repeat     a long file and a short one, twice: `cold`, `warm`, and where the time of the warm one goes
    options    the same file with other options: its audio is not encoded again
    prompt     the same audio with one prompt of 200 tokens, sampled with other seeds: the prompt is not read again
    clients    16 clients with the same file at once, beside an engine that remembers nothing
    broadcast  callers who hear the same broadcast, sent by each in real time's order as fast as it goes
    different  nothing comes twice: seconds of an engine that remembers over those of one that does not, in turns
README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import clips
import machine
import numpy as np

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
RATE_HZ = 16_000
PART_S = 0.2
"""Of a broadcast, put at once."""
STAGES = ("vad_s", "encode_s", "verify_s", "decode_s")


def load(args: argparse.Namespace, model: str, **engine: Any) -> Any:
    import asr_serve
    from asr_serve.config import EngineConfig

    return asr_serve.load(model, dtype=args.dtype, turn_model="none", engine=EngineConfig(**engine))


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.perf_counter()
    found = work()
    return time.perf_counter() - began_s, found


def again(recording: clips.Audio, seed: int) -> clips.Audio:
    """It sounds the same, and no sample is."""
    noise = np.random.default_rng(seed).standard_normal(len(recording)).astype(np.float32)
    return (recording + 1e-5 * noise).astype(np.float32)


def write(folder: Path, name: str, recording: clips.Audio) -> str:
    import wave

    path = folder / f"{name}.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes((recording * 32_767).clip(-32_768, 32_767).astype("<i2").tobytes())
    return str(path)


# --- what comes again -------------------------------------------------------------------------------------


def repeat(args: argparse.Namespace, model: Any, recording: clips.Audio, folder: Path) -> Row:
    """Cold: of files that sound the same, each new. Warm: one of them again."""
    from asr_serve.audio.reader import read_audio
    from asr_serve.engine.cache.digest import audio_digest

    files = [write(folder, f"{len(recording)}-{n}", again(recording, n)) for n in range(args.repeats)]
    model.transcribe(write(folder, f"{len(recording)}-warming", again(recording, 99)))  # shapes are compiled
    colds, warms, texts = [], [], []
    for file in files:
        cold_s, (first,) = timed(partial(model.transcribe, [file]))
        before = model._client.describe()
        warm_s, (second,) = timed(partial(model.transcribe, [file]))
        after = model._client.describe()
        assert first.text == second.text, "the same file, other words"
        colds.append(cold_s)
        warms.append(warm_s)
        texts.append((second.cached_s, {stage: round(after[stage] - before[stage], 4) for stage in STAGES}))
    decode_s, heard = timed(lambda: read_audio(files[0]))
    digest_s, _ = timed(lambda: audio_digest(heard))
    warm_s = statistics.median(warms)
    return {
        "what": "repeat",
        "audio_s": round(len(recording) / RATE_HZ, 1),
        "cold_s": round(statistics.median(colds), 4),
        "warm_s": round(warm_s, 4),
        "cold_over_warm": round(statistics.median(colds) / warm_s, 1),
        "cached_s": round(texts[0][0], 1),
        "warm": {
            "reading_s": round(decode_s, 4),
            "naming_s": round(2 * digest_s, 4),  # for voice activity, and for the segments
            **texts[0][1],
            "rest_s": round(warm_s - decode_s - 2 * digest_s - sum(texts[0][1].values()), 4),
        },
    }


def options(args: argparse.Namespace, model: Any, recording: clips.Audio, other: dict[str, Any]) -> Row:
    """Other options over audio that was heard, beside the same over audio that was not."""
    model.transcribe([again(recording, 99)], **other)
    colds, crosses = [], []
    for n in range(args.repeats):
        audio = again(recording, 100 + n)
        colds.append(timed(partial(model.transcribe, [audio], **other))[0])
        audio = again(recording, 200 + n)
        model.transcribe([audio])
        crosses.append(timed(partial(model.transcribe, [audio], **other))[0])
    cold_s, cross_s = statistics.median(colds), statistics.median(crosses)
    return {
        "what": "options",
        "options": {name: str(value)[:40] for name, value in other.items()},
        "audio_s": round(len(recording) / RATE_HZ, 1),
        "cold_s": round(cold_s, 4),
        "cross_s": round(cross_s, 4),
        "cold_over_cross": round(cold_s / cross_s, 2),
    }


def prompt(args: argparse.Namespace, model: Any, recording: clips.Audio) -> Row:
    """Requests to the engine: a prompt of 200 tokens, an answer of few."""
    from asr_serve.decoding.search_options import SearchOptions

    client = model._client
    said = tuple(np.random.default_rng(1).integers(300, 20_000, 200).tolist())
    chosen: dict[str, Any] = {
        "min_avg_logprob": -1e9,
        "max_compression_ratio": 1e9,
        "max_no_speech": 1.0,
        "prompt": said,
    }

    def ask(seed: int, audio: clips.Audio) -> None:
        wanted = SearchOptions(temperatures=(0.4,), seed=seed, **chosen)
        client.submit(audio, wanted).future.result(300)

    short = recording[: 4 * RATE_HZ]
    ask(1, again(short, 99))
    first, later = [], []
    for n in range(args.repeats):
        audio = again(short, 300 + n)
        client.submit(audio, SearchOptions(temperatures=(0.0,))).future.result(300)  # it is encoded
        first.append(timed(partial(ask, 1, audio))[0])
        later += [timed(partial(ask, seed, audio))[0] for seed in (2, 3)]
    first_s, later_s = statistics.median(first), statistics.median(later)
    return {
        "what": "prompt",
        "tokens": len(said),
        "audio_s": round(len(short) / RATE_HZ, 1),
        "first_s": round(first_s, 4),
        "later_s": round(later_s, 4),
        "spared_s": round(first_s - later_s, 4),
    }


# --- at once ----------------------------------------------------------------------------------------------


def clients(args: argparse.Namespace, models: dict[str, Any], recording: clips.Audio) -> Row:
    found: Row = {"what": "clients", "clients": args.clients, "audio_s": round(len(recording) / RATE_HZ, 1)}
    for name, model in models.items():
        walls, encoded = [], []
        for n in range(args.repeats):
            audio = again(recording, 400 + n)
            before = model._client.describe()["encode_s"]
            walls.append(timed(partial(together, args.clients, model, audio))[0])
            encoded.append(model._client.describe()["encode_s"] - before)
        found[f"{name}_s"] = round(statistics.median(walls), 4)
        found[f"{name}_encode_s"] = round(statistics.median(encoded), 4)
    return {**found, "without_over_with": round(found["without_s"] / found["with_s"], 2)}


def together(count: int, model: Any, audio: clips.Audio) -> None:
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(model.transcribe([audio])[0].text)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == count, "somebody was not answered"
    assert len(set(texts)) == 1, "the same file, other words"


def broadcast(args: argparse.Namespace, models: dict[str, Any], recording: clips.Audio) -> Row:
    """Seconds of computing for callers who put the same parts at the same times."""
    found: Row = {"what": "broadcast", "callers": args.callers, "audio_s": round(len(recording) / RATE_HZ, 1)}
    for name, model in models.items():
        spent = []
        for n in range(args.repeats):
            audio = again(recording, 500 + n)
            before = model._client.describe()
            texts = listen(args.callers, model, audio, args.pace)
            after = model._client.describe()
            assert len(set(texts)) == 1, "the same broadcast, other words"
            spent.append(sum(after[stage] - before[stage] for stage in STAGES))
        found[f"{name}_computing_s"] = round(statistics.median(spent), 3)
    return {**found, "without_over_with": round(found["without_computing_s"] / found["with_computing_s"], 2)}


def listen(callers: int, model: Any, audio: clips.Audio, pace: float) -> list[str]:
    from asr_serve.pipelines.live.events import LiveSegmentDone, SessionFinished
    from asr_serve.pipelines.live.live_session import LiveSession
    from asr_serve.pipelines.options import ListenOptions

    said: list[list[str]] = [[] for _ in range(callers)]
    wake = threading.Event()
    hearing = [LiveSession(model._client, model.tokenizer, ListenOptions(), wake.set) for _ in range(callers)]
    step, at, over = int(PART_S * RATE_HZ), 0, [False] * callers
    due_s = time.monotonic()
    while not all(over):
        now_s = time.monotonic()
        if at < len(audio) and now_s >= due_s:
            for caller in hearing:
                caller.append_audio(audio[at : at + step])
            at, due_s = at + step, due_s + PART_S / pace
            if at >= len(audio):
                for caller in hearing:
                    caller.finish()
        wake.clear()
        for index, caller in enumerate(hearing):
            for event in caller.advance():
                if isinstance(event, LiveSegmentDone):
                    said[index].append(event.segment.text)
                over[index] |= isinstance(event, SessionFinished)
        wake.wait(max(0.0, min(0.05, due_s - time.monotonic())))
    for caller in hearing:
        caller.close()
    return [" ".join(each) for each in said]


# --- what never comes again -------------------------------------------------------------------------------


def different(args: argparse.Namespace, models: dict[str, Any], speech: Sequence[clips.Audio]) -> Row:
    """Rounds in turns, each over audio that neither engine has heard."""
    walls: dict[str, list[float]] = {name: [] for name in models}
    spent: dict[str, list[float]] = {name: [] for name in models}
    """Processor time: what others do on the machine disturbs it less."""
    for n in range(args.rounds):
        audio = [again(each, 1_000 + n) for each in speech]
        turns = list(models.items())
        for name, model in turns if n % 2 else reversed(turns):
            began_s = time.process_time()
            walls[name].append(timed(partial(model.transcribe, audio))[0])
            spent[name].append(time.process_time() - began_s)
    ratios = sorted(a / b for a, b in zip(walls["with"][1:], walls["without"][1:], strict=True))
    return {
        "what": "different",
        "audio_s": round(clips.seconds(speech), 1),
        "rounds": len(ratios),
        "with_s": round(statistics.median(walls["with"]), 4),
        "without_s": round(statistics.median(walls["without"]), 4),
        "least_with_over_least_without": round(min(walls["with"][1:]) / min(walls["without"][1:]), 4),
        "processor_ratio": round(statistics.median(spent["with"][1:]) / statistics.median(spent["without"][1:]), 4),
        "median_ratio": round(statistics.median(ratios), 4),
        "quartiles": [round(ratios[len(ratios) // 4], 4), round(ratios[-1 - len(ratios) // 4], 4)],
    }


# --- all of it --------------------------------------------------------------------------------------------


def rows(args: argparse.Namespace, speech: Sequence[clips.Audio], folder: Path) -> Iterator[Row]:
    short = next(each for each in speech if len(each) >= 6 * RATE_HZ)
    long = np.concatenate([*speech] * (1 + int(args.minutes * 60 // max(1.0, clips.seconds(speech)))))
    long = long[: int(args.minutes * 60 * RATE_HZ)]
    for name in args.models:
        with load(args, name) as model, load(args, name, prefix_bytes=0) as without:
            models = {"with": model, "without": without}
            wanted: dict[str, Callable[[], Row]] = {
                "repeat": partial(repeat, args, model, short, folder),
                "repeat long": partial(repeat, args, model, long, folder),
                "options": partial(options, args, model, long[: 60 * RATE_HZ], {"beam": 2}),
                "prompt": partial(prompt, args, model, short),
                "clients": partial(clients, args, models, long[: 60 * RATE_HZ]),
                "broadcast": partial(broadcast, args, models, long[: 30 * RATE_HZ]),
                "different": partial(different, args, models, speech),
            }
            for what, measure in wanted.items():
                if what.split()[0] not in args.only or (what == "prompt" and "whisper" not in name):
                    continue
                row = {"model": name, **measure()}
                print(json.dumps(row), file=sys.stderr, flush=True)
                yield row


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with FLAC files of speech")
    parser.add_argument("--models", type=lambda text: text.split(","), default=["moonshine-tiny-en"])
    parser.add_argument("--clips", type=int, default=40, help="of the folder, spread evenly")
    parser.add_argument("--minutes", type=float, default=20.0, help="of the long file")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--pace", type=float, default=1.0, help="of a broadcast, times real time")
    parser.add_argument("--rounds", type=int, default=21, help="of `different`; the first is not counted")
    parser.add_argument("--repeats", type=int, default=3, help="of everything else; the median is told")
    parser.add_argument("--dtype", default="auto")
    known = ["repeat", "options", "prompt", "clients", "broadcast", "different"]
    parser.add_argument("--only", type=lambda text: text.split(","), default=known, help=",".join(known))
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    import tempfile

    args = parse(argv)
    speech = [clip.audio for clip in clips.without_text(args.data, args.clips)]
    described = machine.describe(machine.cores())
    with tempfile.TemporaryDirectory() as folder:
        found = list(rows(args, speech, Path(folder)))
    report = {"bench": "prefix", "machine": described, "rows": found}
    machine.tell(args.json, report)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "src"))
    sys.exit(main())
