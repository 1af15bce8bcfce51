"""Speech probabilities -> segments: where a caller starts and stops talking."""

from asr_serve.vad.endpoint import EndpointConfig, Endpointer
from asr_serve.vad.schedule import OFFLINE, STREAMING, SilenceSchedule

__all__ = ["OFFLINE", "STREAMING", "EndpointConfig", "Endpointer", "SilenceSchedule"]
