"""Times of live words: a clip is sent to /v1/stream at its own speed, and what comes back is timed.

The definitions are those of bench/live.py. First word: from the moment when the sample was sent with which the clip's
speech begins (Silero's first window with speech) to the first text. Final: from the end command to the last segment,
for clips whose last segment that command closed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from asr_serve.api.client.stream import StreamClient
from asr_serve.api.client.transcript import SessionTranscript
from asr_serve.errors import Unreachable
from asr_serve.protocols.stream.server_events import SegmentEvent, StreamErrorEvent
from asr_serve.units import RATE_HZ, ms_to_samples, samples_to_s

PACKET_SAMPLES = ms_to_samples(100)
WINDOW_SAMPLES = 512
SPEECH = 0.5
GRACE_S = 60.0
"""Time to wait for the last words."""


class LiveAnswer(NamedTuple):
    text: str
    first_word_ms: float | None
    final_ms: float | None


def stream_clip(
    server: str, model: str, pcm: np.ndarray, api_key: str | None, language: str | None, hotwords: Sequence[str] = ()
) -> LiveAnswer:
    """Streams (n,) float32 at 16 kHz and returns the text and its times. Raises Refused, Unreachable."""
    data = np.clip(np.rint(pcm * 32_768), -32_768, 32_767).astype("<i2")
    onset = speech_onset_samples(pcm)
    query: dict[str, Any] = {"encoding": "s16le", "rate": RATE_HZ, "model": model}
    if language:
        query["language"] = language
    if hotwords:
        query["hotwords"] = ",".join(hotwords)
    texts: list[tuple[float, str]] = []
    segments: list[float] = []
    said = SessionTranscript()

    def read(stream: StreamClient) -> None:
        for event in stream:
            now = time.monotonic()
            if isinstance(event, StreamErrorEvent):
                raise Unreachable(f"{event.code}: {event.message}")
            if said.note(event):
                texts.append((now, said.text))
            if isinstance(event, SegmentEvent):
                segments.append(now)

    with ThreadPoolExecutor(1) as pool, StreamClient(server, api_key=api_key, **query) as stream:
        reader = pool.submit(read, stream)
        began = time.monotonic()
        onset_sent = None
        for start in range(0, len(data), PACKET_SAMPLES):
            packet = data[start : start + PACKET_SAMPLES]
            # A packet is sent when its last sample has been spoken.
            time.sleep(max(0.0, began + samples_to_s(start + len(packet)) - time.monotonic()))
            stream.send(packet.tobytes())
            if onset_sent is None and onset is not None and onset < start + len(packet):
                onset_sent = time.monotonic()
        ended = time.monotonic()
        stream.end()
        reader.result(GRACE_S)
    first = next((when for when, text in texts if text.strip()), None)
    first_ms = 1_000 * (first - onset_sent) if first is not None and onset_sent is not None else None
    final_ms = 1_000 * (segments[-1] - ended) if segments and segments[-1] > ended else None
    return LiveAnswer(said.final, first_ms, final_ms)


def speech_onset_samples(pcm: np.ndarray) -> int | None:
    """Sample with which the first window of speech begins; None where there is none."""
    import torch

    model = _voice_activity()
    windows = -(-len(pcm) // WINDOW_SAMPLES)
    sound = np.zeros((1, windows * WINDOW_SAMPLES), np.float32)
    sound[0, : len(pcm)] = pcm
    with torch.inference_mode():
        found, _ = model.step(torch.from_numpy(sound), model.state(1), torch.tensor([windows]))
    speech = np.flatnonzero(found[0, :windows].numpy() >= SPEECH)
    return int(speech[0]) * WINDOW_SAMPLES if len(speech) else None


@cache
def _voice_activity() -> Any:
    from asr_serve.models.auxiliary import silero

    return silero.load()
