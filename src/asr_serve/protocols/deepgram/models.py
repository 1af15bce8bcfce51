"""Names of Deepgram's models, and models as its answers describe them."""

from __future__ import annotations

import uuid

import msgspec

from asr_serve import __version__
from asr_serve.protocols.openai.events import Problem

RECOGNITION_FAMILIES = ("nova", "enhanced", "base", "flux")
"""Families of Deepgram's recognition models, which versions and domains follow: `nova-3`, `nova-2-phonecall`."""
WHISPER_NAMES = (
    "whisper",
    "whisper-cloud",
    *(f"whisper-{size}" for size in ("tiny", "base", "small", "medium", "large")),
)
"""Names of Deepgram's Whisper models. Some are names of models here, too."""
VOICE_FAMILY = "aura"
"""Family of Deepgram's voices: `aura-2-thalia-en`. There a voice is a model."""
DEPRECATED_KEY = "deprecated"
"""Value of `transaction_key`, which its clients still expect."""
_NAMESPACE = uuid.UUID("6d5f7a52-3b86-4c3f-9f0e-6a1f5b1d0c11")


def is_deepgram_recognition_model(name: str) -> bool:
    return name in RECOGNITION_FAMILIES or name.startswith(tuple(f"{family}-" for family in RECOGNITION_FAMILIES))


def is_deepgram_whisper(name: str) -> bool:
    return name in WHISPER_NAMES


def is_deepgram_voice(name: str) -> bool:
    return name == VOICE_FAMILY or name.startswith(f"{VOICE_FAMILY}-")


class DeepgramModelInfo(msgspec.Struct, frozen=True):
    """Model in Deepgram's answers."""

    name: str
    version: str = __version__
    """Version of this server."""
    arch: str = "asr-serve"


class DeepgramProblem(msgspec.Struct, frozen=True):
    """Answer to a request that is refused or failed: OpenAI's, as on all routes, and Deepgram's members."""

    error: Problem
    err_code: str
    err_msg: str
    request_id: str


def model_uuid(name: str) -> str:
    """Identifier of a model, the same for the same name."""
    return str(uuid.uuid5(_NAMESPACE, name))
