"""Loudspeaker output by PortAudio. Loads sounddevice, as the microphone does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from asr_serve.errors import SourceNotFound, UnsupportedOption

LATENCY_S = 0.1
"""Audio buffered by the device: chunks may arrive late by as much."""
TO_FILE = "write it to a file instead: -o speech.wav"


@contextlib.contextmanager
def open_player(rate_hz: int) -> Iterator[LoudspeakerSink]:
    """Opens the loudspeaker while audio is played, to its last sample unless an error occurs. Raises UnsupportedOption
    without sounddevice or PortAudio; SourceNotFound where there is no loudspeaker, or it may not be used."""
    portaudio = _portaudio()
    try:
        stream = portaudio.RawOutputStream(samplerate=rate_hz, channels=1, dtype="int16", latency=LATENCY_S)
    except (ValueError, portaudio.PortAudioError) as error:
        raise _no_loudspeaker(error) from None
    with contextlib.closing(stream):
        try:
            stream.start()
            yield LoudspeakerSink(stream)
            stream.stop()  # waits until everything written has been played
        except portaudio.PortAudioError as error:
            raise _no_loudspeaker(error) from None


class LoudspeakerSink:
    """Plays the audio that is written to it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.gaps = 0
        """Number of times that the device ran out of audio."""
        self._begun = False

    def write(self, pcm: np.ndarray) -> None:
        """Plays (n,) int16. Blocks while the device's buffer is full."""
        if len(pcm):
            missed = self._stream.write(pcm.astype("<i2").tobytes())
            self.gaps += bool(missed and self._begun)
            self._begun = True


def check_player() -> None:
    """Raises what `open_player` raises where nothing can be played; called before any work."""
    portaudio = _portaudio()
    try:
        portaudio.query_devices(None, "output")
    except (ValueError, portaudio.PortAudioError) as error:
        raise _no_loudspeaker(error) from None


def _portaudio() -> Any:
    try:
        import sounddevice
    except ImportError:
        raise UnsupportedOption(
            "no --output, and sounddevice, which plays, is not installed",
            "it comes with the extra mic",
            f"pip install 'asr-serve[mic]', or {TO_FILE}",
        ) from None
    except OSError:
        raise UnsupportedOption(
            "no --output, and PortAudio, which plays, is not installed",
            "sounddevice needs its library",
            f"on Debian and Ubuntu: apt install libportaudio2; or {TO_FILE}",
        ) from None
    return sounddevice


def _no_loudspeaker(error: Exception) -> SourceNotFound:
    return SourceNotFound(
        f"no loudspeaker can be used: {error}",
        "one must be there, free, and allowed to this user (on Linux: the group audio)",
        TO_FILE,
    )
