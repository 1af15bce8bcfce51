"""Loudspeaker output by PortAudio. Loads sounddevice, as the microphone does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from asr_serve.api.cli.io.speech_outputs import SpeechWriter
from asr_serve.errors import SourceNotFound, UnsupportedOption

LATENCY_S = 0.1
"""Audio buffered by the device: chunks may arrive late by as much."""
TO_FILE = "write it to a file instead: -o speech.wav"


@contextlib.contextmanager
def open_player(rate_hz: int) -> Iterator[SpeechWriter]:
    """Opens the loudspeaker; writing blocks while the device's buffer is full. All is played to its last sample, unless
    an error occurs. Raises UnsupportedOption without sounddevice or PortAudio; SourceNotFound where there is no
    loudspeaker, or it may not be used."""
    portaudio = _portaudio()
    try:
        stream = portaudio.RawOutputStream(samplerate=rate_hz, channels=1, dtype="int16", latency=LATENCY_S)
    except (ValueError, portaudio.PortAudioError) as error:
        raise _no_loudspeaker(error) from None
    with contextlib.closing(stream):
        try:
            stream.start()
            yield lambda pcm: stream.write(pcm.astype("<i2").tobytes()) if len(pcm) else None
            stream.stop()  # waits until everything written has been played
        except portaudio.PortAudioError as error:
            raise _no_loudspeaker(error) from None


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
