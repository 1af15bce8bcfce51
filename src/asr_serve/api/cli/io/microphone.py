"""Microphone input by PortAudio. Loads sounddevice, as the loudspeaker does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from asr_serve.api.cli.io.audio_sources import InterruptHandler
from asr_serve.audio.pcm import SAMPLE_BYTES
from asr_serve.errors import AsrServeError, OptionError, SourceNotFound, UnsupportedOption
from asr_serve.units import RATE_HZ, samples_to_s

MAX_BUFFERED_S = 60
"""Limit of recorded audio not yet read; more is dropped, and counted."""
BLOCKS_A_SECOND = 50
RATES_HZ = (RATE_HZ, 48_000, 44_100)
"""Sample rates to try; the device's own is tried after the first."""
STOP_S = 1.0


class MicrophoneSource:
    """Source of 16-bit mono samples at `rate_hz`, recorded by a thread until ctrl-C.

    Raises UnsupportedOption without sounddevice or PortAudio; SourceNotFound where there is no microphone, or it
    may not be used; OptionError for one that does not exist.
    """

    interrupted = False
    """Always False: ctrl-C is the regular end."""

    def __init__(self, chosen: str | None = None) -> None:
        """`chosen`: the device's number or part of its name."""
        self._portaudio = _portaudio()
        device = self._find(chosen)
        self.name: str = device["name"]
        self._device: int = device["index"]
        self.rate_hz = self._accepted(device)
        self.overflows = self.lost_samples = 0
        """Overflows reported by the device; samples dropped here."""
        self._failure: AsrServeError | None = None
        self._most_blocks = MAX_BUFFERED_S * BLOCKS_A_SECOND
        self._blocks: deque[bytes] = deque()
        self._chunk = b""
        self._changed = threading.Condition()
        self._stopped = False
        self._ctrl_c = InterruptHandler()

    def open(self, rate_hz: int | None) -> int:
        return self.rate_hz

    def chunks(self, notice: Callable[[str], None]) -> Iterator[bytes]:
        """Starts recording and yields chunks."""
        thread = threading.Thread(target=self._record, args=(notice,), name="microphone", daemon=True)
        thread.start()
        try:
            with self._ctrl_c:
                while self._ctrl_c.unless(self._more):
                    yield self._captured()
                with self._changed:
                    self._stopped = True
                thread.join(STOP_S)
                self._more()
                if self._chunk:
                    yield self._captured()
        finally:
            with self._changed:
                self._stopped = True
            thread.join(STOP_S)

    def overflow_report(self) -> str:
        if self._failure is not None:
            raise self._failure
        parts = []
        if self.lost_samples:
            parts.append(f"{samples_to_s(self.lost_samples, self.rate_hz):.1f} s of audio were lost")
        if self.overflows:
            parts.append(f"the microphone dropped some audio {self.overflows} times")
        return ", ".join(parts)

    def _captured(self) -> bytes:
        chunk, self._chunk = self._chunk, b""
        return chunk

    def _more(self) -> bool:
        """Waits for audio; False: no more follows."""
        with self._changed:
            self._changed.wait_for(lambda: self._blocks or self._stopped)
            if not self._blocks:
                return False
            self._chunk += b"".join(self._blocks)
            self._blocks.clear()
            return True

    def _record(self, notice: Callable[[str], None]) -> None:
        try:
            with self._portaudio.RawInputStream(
                samplerate=self.rate_hz, channels=1, dtype="int16", device=self._device
            ) as stream:
                while not self._stopped:
                    block, overflowed = stream.read(self.rate_hz // BLOCKS_A_SECOND)
                    if self._on_block(bytes(block), overflowed=overflowed):
                        notice("warning: audio of the microphone is being lost: this machine is too slow")
        except self._portaudio.PortAudioError as error:
            self._failure = _unusable(self.name, error)
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()

    def _on_block(self, block: bytes, *, overflowed: bool) -> bool:
        """Stores a block; returns whether audio was lost for the first time."""
        with self._changed:
            before = self.overflows or self.lost_samples
            self.overflows += overflowed
            if len(self._blocks) >= self._most_blocks:
                self.lost_samples += len(block) // SAMPLE_BYTES
            else:
                self._blocks.append(block)
                self._changed.notify_all()
            return not before and bool(self.overflows or self.lost_samples)

    def _find(self, chosen: str | None) -> dict[str, Any]:
        query = int(chosen) if chosen and chosen.isdecimal() else chosen
        try:
            device_info: dict[str, Any] = self._portaudio.query_devices(query, "input")
        except (ValueError, self._portaudio.PortAudioError) as error:
            inputs = [
                f"{device['index']} {device['name']}"
                for device in self._portaudio.query_devices()
                if device["max_input_channels"]
            ]
            if chosen is not None and inputs:
                raise OptionError(
                    f"--input {chosen}: {error}", f"one of: {'; '.join(inputs)}", "give its number"
                ) from None
            raise SourceNotFound(
                "no microphone was found",
                "PortAudio sees none on this machine; another machine's can be piped in",
                "plug one in, or check that this user may use it (on Linux: the group audio); "
                "or record elsewhere: ... | asr-serve listen -",
            ) from None
        return device_info

    def _accepted(self, device: dict[str, Any]) -> int:
        """Returns the first sample rate that the device accepts."""
        own_hz = int(device["default_samplerate"])
        first_error: Exception | None = None
        for rate_hz in (RATES_HZ[0], own_hz, *RATES_HZ[1:]):
            try:
                self._portaudio.check_input_settings(
                    device=device["index"], channels=1, dtype="int16", samplerate=rate_hz
                )
            except self._portaudio.PortAudioError as error:
                first_error = first_error or error
            else:
                return rate_hz
        assert first_error is not None
        raise _unusable(device["name"], first_error) from None


def _portaudio() -> Any:
    try:
        import sounddevice
    except ImportError:
        raise UnsupportedOption(
            "--mic, and sounddevice is not installed", "it needs the extra mic", "pip install 'asr-serve[mic]'"
        ) from None
    except OSError:
        raise UnsupportedOption(
            "--mic, and PortAudio is not installed",
            "sounddevice needs its library",
            "install it; on Debian and Ubuntu: apt install libportaudio2",
        ) from None
    return sounddevice


def _unusable(name: str, error: Exception) -> SourceNotFound:
    return SourceNotFound(
        f"the microphone {name!r} cannot be used: {error}",
        "it must be there, free, and allowed to this user",
        "check the system's settings for privacy and sound, or choose another with --input",
    )
