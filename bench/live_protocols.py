"""Our live protocols, as their clients speak them: what a caller sends, and its answers in one form for all.

A module for the process of the callers: nothing of asr-serve is imported.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from typing import Protocol as Typed

import live_speech
import numpy as np
from live_speech import RATE_HZ

OPENAI_HZ = 24_000
REFUSED = "at_capacity"
"""Code of a server that has no capacity for one more caller."""
Message = dict[str, Any]
"""{"sentences": [{"text", "start", "end"}], "partial": text}, times in ms."""
Timed = tuple[float, Message]


class Protocol(Typed):
    path: str
    hello: str | None
    """Sent first."""
    goodbye: str
    """Sent last; what the client waits for then is whatever `ended` knows."""

    def packets(self, pcm: np.ndarray) -> list[str | bytes]:
        """All 16-bit samples at 16 kHz of a call, 100 ms each, as they are sent: made before the clock runs."""
        ...

    def ready(self, answer: Message) -> bool: ...

    def ended(self, text: str, *, parting: bool) -> bool:
        """Called with every answer. `parting`: we have said goodbye."""
        ...

    def heard(self, answers: Iterable[Timed]) -> Iterator[Timed]:
        """In the form of Message."""
        ...


def code(answer: Message) -> str | None:
    """What a server says was wrong, in whichever protocol; None for any other message."""
    if "error" not in (answer.get("event"), str(answer.get("type")).lower()):
        return None
    return str(_problem(answer).get("code"))


def retry_s(answer: Message) -> float | None:
    """When a server that refuses says to try again, in whichever protocol; None where it does not."""
    wait_ms = _problem(answer).get("retry_after_ms")
    return None if wait_ms is None else wait_ms / 1_000


def _problem(answer: Message) -> Message:
    """OpenAI's error is a member of its own; FunASR's runtime has its text there."""
    inner = answer.get("error")
    return inner if isinstance(inner, dict) else answer


def packet_ends(samples: int) -> list[int]:
    return [end for _, end in live_speech.packets(samples)]


def plain_packets(pcm: np.ndarray) -> list[str | bytes]:
    return [pcm[start:end].tobytes() for start, end in live_speech.packets(len(pcm))]


def sentence(text: str, start_ms: float, end_ms: float) -> Message:
    return {"sentences": [{"text": text, "start": start_ms, "end": end_ms}], "partial": ""}


class FunAsr:
    """PCM in frames, whole answers."""

    hello: str | None = "START"
    goodbye = "STOP"

    def __init__(self, silence_ms: int | None) -> None:
        self.path = "/?sentences=new" + ("" if silence_ms is None else f"&silence_schedule=inf:{silence_ms}")

    def packets(self, pcm: np.ndarray) -> list[str | bytes]:
        return plain_packets(pcm)

    def ready(self, answer: Message) -> bool:
        return answer.get("event") == "started"

    def ended(self, text: str, *, parting: bool) -> bool:
        return text.startswith('{"event":"stopped"')

    def heard(self, answers: Iterable[Timed]) -> Iterator[Timed]:
        return ((when, answer) for when, answer in answers if "sentences" in answer)


class Stream:
    """PCM in frames, what is new in each event."""

    hello: str | None = None
    goodbye = '{"type":"end"}'

    def __init__(self, silence_ms: int | None) -> None:
        self.path = "/v1/stream" + ("" if silence_ms is None else f"?silence_schedule=inf:{silence_ms}")

    def packets(self, pcm: np.ndarray) -> list[str | bytes]:
        return plain_packets(pcm)

    def ready(self, answer: Message) -> bool:
        return answer.get("type") == "session"

    def ended(self, text: str, *, parting: bool) -> bool:
        return text.startswith('{"type":"end"')

    def heard(self, answers: Iterable[Timed]) -> Iterator[Timed]:
        locked = ""
        for when, answer in answers:
            match answer["type"]:
                case "locked":
                    locked += answer["text"]
                case "partial":
                    yield when, {"sentences": [], "partial": locked + answer["text"]}
                case "segment":
                    locked = ""
                    yield when, sentence(answer["text"], 1_000 * answer["start_s"], 1_000 * answer["end_s"])


class OpenAi:
    """Base64 of 24 kHz in JSON, an event for each step of an item. With our partials: without them nothing is told
    of an item before it is certain."""

    goodbye = '{"type":"input_audio_buffer.commit"}'

    def __init__(self, silence_ms: int | None) -> None:
        assert silence_ms is not None, "its voice activity waits for one pause, always the same"
        self.path = "/v1/realtime?intent=transcription&partials=true"
        vad = {"type": "server_vad", "silence_duration_ms": silence_ms}
        heard = {"format": {"type": "audio/pcm", "rate": OPENAI_HZ}, "turn_detection": vad}
        session = {"type": "transcription", "audio": {"input": heard}}
        self.hello: str | None = json.dumps({"type": "session.update", "session": session})
        self._open = 0

    def packets(self, pcm: np.ndarray) -> list[str | bytes]:
        import soxr

        resampled = soxr.resample(pcm, RATE_HZ, OPENAI_HZ)
        sizes = packet_ends(len(pcm))
        ends = [round(end * OPENAI_HZ / RATE_HZ) for end in sizes[:-1]] + [len(resampled)]
        cuts = zip([0, *ends], ends, strict=False)
        pieces = (base64.b64encode(resampled[start:end].tobytes()).decode() for start, end in cuts)
        return [f'{{"type":"input_audio_buffer.append","audio":"{piece}"}}' for piece in pieces]

    def ready(self, answer: Message) -> bool:
        return answer.get("type") == "session.updated"

    def ended(self, text: str, *, parting: bool) -> bool:
        kind = text[:100]
        self._open += '_buffer.committed"' in kind
        if '_transcription.completed"' not in kind:
            return parting and "commit_empty" in text
        self._open -= 1
        return parting and not self._open

    def heard(self, answers: Iterable[Timed]) -> Iterator[Timed]:
        """Where the next item begins is known before the last one's words are."""
        spans: dict[str, list[float]] = {}
        for when, answer in answers:
            match answer["type"].rpartition(".")[2]:
                case "speech_started":
                    spans[answer["item_id"]] = [answer["audio_start_ms"]] * 2
                case "speech_stopped":
                    spans[answer["item_id"]][1] = answer["audio_end_ms"]
                case "partial":
                    yield when, {"sentences": [], "partial": answer["transcript"]}
                case "completed" if answer["transcript"]:
                    yield when, sentence(answer["transcript"], *spans[answer["item_id"]])


class FunAsr2Pass:
    """FunASR's runtime protocol: words as they come, then each sentence."""

    hello: str | None = '{"mode":"2pass","wav_name":"a","itn":false,"is_speaking":false}'
    """Only this first message has an answer; its options stand for what follows."""
    goodbye = '{"is_speaking":false,"is_end":true}'

    def __init__(self, silence_ms: int | None) -> None:
        self.path = "/" + ("" if silence_ms is None else f"?silence_schedule=inf:{silence_ms}")

    def packets(self, pcm: np.ndarray) -> list[str | bytes]:
        return plain_packets(pcm)

    def ready(self, answer: Message) -> bool:
        return bool(answer.get("is_final"))

    def ended(self, text: str, *, parting: bool) -> bool:
        return parting and '"is_end":true' in text

    def heard(self, answers: Iterable[Timed]) -> Iterator[Timed]:
        partial = ""
        for when, answer in answers:
            if answer["mode"] == "2pass-online":
                partial += answer["text"]
                yield when, {"sentences": [], "partial": partial}
            elif answer["text"]:
                partial = ""
                yield when, sentence(answer["text"].strip(), answer["start_time"], answer["end_time"])


class Deepgram:
    """PCM in frames, interim and final results."""

    hello: str | None = '{"type":"Finalize"}'
    """Only an answer to something tells that the server is there."""
    goodbye = '{"type":"CloseStream"}'

    def __init__(self, silence_ms: int | None) -> None:
        pause = "" if silence_ms is None else f"&endpointing={silence_ms}"
        self.path = f"/v1/listen?encoding=linear16&sample_rate={RATE_HZ}&interim_results=true{pause}"

    def packets(self, pcm: np.ndarray) -> list[str | bytes]:
        return plain_packets(pcm)

    def ready(self, answer: Message) -> bool:
        return bool(answer.get("from_finalize"))

    def ended(self, text: str, *, parting: bool) -> bool:
        return text.startswith('{"type":"Metadata"')

    def heard(self, answers: Iterable[Timed]) -> Iterator[Timed]:
        for when, answer in answers:
            if answer["type"] != "Results":
                continue
            text, start_s = answer["channel"]["alternatives"][0]["transcript"], answer["start"]
            if not answer["is_final"]:
                yield when, {"sentences": [], "partial": text}
            elif text:
                yield when, sentence(text, 1_000 * start_s, 1_000 * (start_s + answer["duration"]))


def riva(silence_ms: int | None) -> Protocol:
    """Riva's, by gRPC: its packages are loaded for it alone."""
    from live_riva import Riva

    return Riva(silence_ms)


NAMES: dict[str, Callable[[int | None], Protocol]] = {
    "funasr": FunAsr,
    "funasr2pass": FunAsr2Pass,
    "openai": OpenAi,
    "stream": Stream,
    "deepgram": Deepgram,
    "riva": riva,
}
