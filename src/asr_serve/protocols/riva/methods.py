"""Methods of Riva's services, and the status by which the application tells the gRPC server of an error."""

from __future__ import annotations

from pathlib import Path

import msgspec

DESCRIPTORS = Path(__file__).parent / "descriptors.binpb"
"""Compiled .proto files."""
ASR_SERVICE, TTS_SERVICE = "nvidia.riva.asr.RivaSpeechRecognition", "nvidia.riva.tts.RivaSpeechSynthesis"
RECOGNIZE, STREAMING_RECOGNIZE, RECOGNITION_CONFIG = (
    f"/{ASR_SERVICE}/{name}" for name in ("Recognize", "StreamingRecognize", "GetRivaSpeechRecognitionConfig")
)
SYNTHESIZE, SYNTHESIZE_ONLINE, SYNTHESIS_CONFIG = (
    f"/{TTS_SERVICE}/{name}" for name in ("Synthesize", "SynthesizeOnline", "GetRivaSynthesisConfig")
)
PATHS = (RECOGNIZE, STREAMING_RECOGNIZE, RECOGNITION_CONFIG, SYNTHESIZE, SYNTHESIZE_ONLINE, SYNTHESIS_CONFIG)
"""Paths of all methods: routes in logs and metrics. No URL of the HTTP port leads there."""
MESSAGE_TYPE = "application/grpc+proto"

GRPC_CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "FAILED_PRECONDITION",
    410: "NOT_FOUND",
    413: "RESOURCE_EXHAUSTED",
    415: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    503: "UNAVAILABLE",
}
"""Status of HTTP, of which every error has one -> code of gRPC. What is not here is INTERNAL."""


class RivaStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """Status that ends a call with an error."""

    code: str
    """Name of gRPC's code."""
    message: str
    """Sentences that say what came, what is allowed and what to do."""
    retry_after_ms: int | None = None


def encode_status(http_status: int, message: str, retry_after_ms: int | None = None) -> bytes:
    """Status of an error that HTTP answers with that status."""
    return msgspec.json.encode(RivaStatus(GRPC_CODES.get(http_status, "INTERNAL"), message, retry_after_ms))


def decode_status(status: str | bytes) -> RivaStatus:
    """Status that `encode_status` made."""
    return msgspec.json.decode(status, type=RivaStatus)
