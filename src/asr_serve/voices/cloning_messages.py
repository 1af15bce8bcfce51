"""What somebody wants cloned, how far that is, and what became of it: what a server and the process that does it
say to each other."""

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
"""At what share of all work each begins."""


class CloneRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be cloned."""

    name: str
    audio: list[str]
    """Files, folders and lists."""
    texts: dict[str, str] = {}
    """By a recording's name, without its ending: what is said in it. The others are heard."""
    consent: Consent
    model: str
    weights: str | None = None
    """Folder of another checkpoint of that model."""
    codec: str | None = None
    recogniser: str | None = None
    """Model that hears what is said. None: the packaged one."""
    voices_dir: str
    minutes: float = 10.0
    """Of learning, at most: it ends when it gets no better."""
    seed: int = 0
    threads: int | None = None


class ClipReport(msgspec.Struct, frozen=True):
    """What became of a clip."""

    clip: str
    seconds: float
    text: str
    left_out: str = ""
    """Why, in words; empty where it is learnt from."""


class CloneProgress(msgspec.Struct, frozen=True, tag="progress"):
    """How far it is."""

    stage: Stage
    share: float
    """Of all work, 0 to 1."""
    held_out: float | None = None
    """The loss on clips that are not learnt from; falls."""
    left_s: float | None = None
    """At most, where that is known."""


class CloneReport(msgspec.Struct, frozen=True, tag="report"):
    """It is done: the voice is in its folder."""

    card: ClonedVoiceCard
    clips: list[ClipReport]
    before: float
    after: float
    """The loss on clips that were not learnt from: of the voice that it began as, and of this one."""
    took_s: float


class CloneFailed(msgspec.Struct, frozen=True, tag="failed"):
    """It came to nothing."""

    code: str
    message: str


Said = CloneProgress | CloneReport | CloneFailed
