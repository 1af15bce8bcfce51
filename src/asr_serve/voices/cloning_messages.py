"""Messages between a server and the process that clones a voice: request, progress, result."""

from __future__ import annotations

from typing import Literal

import msgspec

from asr_serve.voices.cloned_voice import ClonedVoiceCard, Consent

Stage = Literal["waiting", "loading", "listening", "aligning", "learning", "comparing", "done"]
STAGES: dict[Stage, float] = {
    "waiting": 0.0,
    "loading": 0.0,
    "listening": 0.02,
    "aligning": 0.12,
    "learning": 0.2,
    "comparing": 0.95,
    "done": 1.0,
}
"""Fraction of all work at which each stage begins."""


class CloneRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to clone a voice."""

    name: str
    audio: list[str]
    """Files, folders and lists."""
    texts: dict[str, str] = {}
    """Transcripts by a recording's name, without its ending. Other recordings are recognized."""
    consent: Consent
    model: str
    weights: str | None = None
    """Folder of another checkpoint of that model."""
    vocoder: str | None = None
    """Vocoder with which clips are compared: a name, or a folder. None: the one on the model's card."""
    recogniser: str | None = None
    """Model that recognizes recordings. None: the packaged one."""
    voices_dir: str
    minutes: float = 10.0
    """Time limit of training, which ends earlier after its number of steps."""
    seed: int = 0
    threads: int | None = None


class ClipReport(msgspec.Struct, frozen=True):
    """Outcome for a clip."""

    clip: str
    seconds: float
    text: str
    left_out: str = ""
    """Reason in words; empty where it is used for training."""


class CloneProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Progress of cloning."""

    stage: Stage
    share: float
    """Fraction of all work, 0 to 1."""
    held_out: float | None = None
    """Loss on held-out clips; falls."""
    left_s: float | None = None
    """Upper bound, where it is known."""


class CloneReport(msgspec.Struct, frozen=True, tag="report"):
    """Success: the voice is in its folder."""

    card: ClonedVoiceCard
    clips: list[ClipReport]
    before: float
    after: float
    """Losses on held-out clips: of the voice that it was initialized from, and of this one."""
    took_s: float


class CloneFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Failure: no voice was made."""

    code: str
    message: str


CloneMessage = CloneProgress | CloneReport | CloneFailed
