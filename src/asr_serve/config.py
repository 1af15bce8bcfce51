"""Settings. Frozen, strict, printable; the only file that reads the environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asr_serve.errors import OptionError


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How much the engine takes on at once. Every number is a bound; the defaults suit a laptop CPU.

    Raises OptionError for a number out of range.
    """

    max_decode_rows: int = 64
    """Sequences that share one decoding step."""
    encode_frames: int | None = None
    """Encoder frames in one encode batch, padding included. It bounds how long a live step can be held up.
    None: as many as the device needs to be busy."""
    encode_padding: float = 0.15
    """Largest share of an encode batch that may be padding."""
    kv_bytes: int = 512 << 20
    """Memory for the decoder's keys and values, self- and cross-attention together."""
    max_requests: int = 2_048
    """Requests that may be in the engine, waiting or running; one more is refused with AtCapacity."""
    max_audio_s: float = 7_200.0
    """Seconds of audio that may be in the engine, over all requests."""
    vad_step_windows: int = 8_192
    """Windows of 32 ms in one voice-activity step, over all callers, padding included."""
    vad_windows: int = 1_024
    """Windows one caller may hand in at once."""
    max_sessions: int = 1_024
    """Callers with voice-activity state."""
    interactive_share: float = 0.8
    """Share of the machine that interactive work gets while bulk work waits too."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"{name}={value}", f"{name} must be greater than 0")
        if self.vad_windows < 64:
            raise OptionError(f"vad_windows={self.vad_windows}", "64 or more: two seconds")
        if self.encode_padding >= 1 or self.interactive_share >= 1:
            raise OptionError(
                f"encode_padding={self.encode_padding}, interactive_share={self.interactive_share}",
                "both are shares, below 1",
            )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """From a mapping; an unknown key fails and names the nearest known one."""
        for key in settings:
            if key not in cls.__struct_fields__:
                raise unknown("engine setting", key, cls.__struct_fields__)
        return cls(**settings)


def unknown(what: str, came: str, allowed: tuple[str, ...] | list[str]) -> OptionError:
    """The error for a name that is not one of `allowed`, with the nearest one first."""
    near = difflib.get_close_matches(came, allowed, n=1)
    todo = f"did you mean {near[0]!r}?" if near else ""
    return OptionError(f"unknown {what} {came!r}", f"allowed: {', '.join(allowed)}", todo)


def cache_dir() -> Path:
    """Where converted and fetched weights are kept: ASR_SERVE_CACHE, else XDG_CACHE_HOME/asr-serve."""
    chosen = os.environ.get("ASR_SERVE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "asr-serve"


def native_wanted() -> bool:
    """False when ASR_SERVE_NATIVE=0 asks for the Python twins."""
    return os.environ.get("ASR_SERVE_NATIVE", "1") != "0"


def threads_wanted() -> int | None:
    """ASR_SERVE_THREADS, or None to use every core this process may run on."""
    text = os.environ.get("ASR_SERVE_THREADS")
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise OptionError(f"ASR_SERVE_THREADS={text!r}", "a whole number of threads, 1 or more")
    return int(text)
