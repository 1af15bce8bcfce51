"""The loudspeaker, by PortAudio. Loads sounddevice, as the microphone does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from asr_serve.errors import SourceNotFound, UnsupportedOption

LATENCY_S = 0.1
"""Of sound that the device holds: pieces may come unevenly by so much."""
TO_FILE = "write it to a file instead: -o speech.wav"


@contextlib.contextmanager
def open_player(rate_hz: int) -> Iterator[LoudspeakerSink]:
    """Open while sound is played, to its last sample unless something goes wrong.

    Raises UnsupportedOption without sounddevice or PortAudio; SourceNotFound where there is no loudspeaker, or it
    may not be used.
    """
    portaudio = _portaudio()
    try:
        stream = portaudio.RawOutputStream(samplerate=rate_hz, channels=1, dtype="int16", latency=LATENCY_S)
    except (ValueError, portaudio.PortAudioError) as error:
        raise _no_loudspeaker(error) from None
    with contextlib.closing(stream):
        try:
            stream.start()
            yield LoudspeakerSink(stream)
            stream.stop()  # waits until what was written has sounded
        except portaudio.PortAudioError as error:
            raise _no_loudspeaker(error) from None


class LoudspeakerSink:
    """Plays what it is given."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.gaps = 0
        """How often nothing was there to be played."""
        self._begun = False

    def write(self, pcm: np.ndarray) -> None:
        """(n,) int16. Waits while the device has enough."""
        if len(pcm):
            missed = self._stream.write(pcm.astype("<i2").tobytes())
            self.gaps += bool(missed and self._begun)
            self._begun = True


def check_player() -> None:
    """Before any work: raises what `player` does where nothing can be played here."""
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
