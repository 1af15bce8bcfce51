"""State of a live session between two calls, as data: with the audio from `audio_from` on, another engine of the same
model continues from it, and contradicts nothing that the session has reported."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from asr_serve.audio.endpointing import EndpointerState
from asr_serve.pipelines.live.events import FlushDone, LivePartial, TurnEvent
from asr_serve.pipelines.live.segment_state import LiveSegmentStates
from asr_serve.pipelines.live.turn_detector import TurnState
from asr_serve.pipelines.live.voice_activity import VoiceActivityState
from asr_serve.pipelines.silence_tracker import SilenceState


class LiveSessionState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a LiveSession, whose fields these are."""

    audio_from: int
    """Start of the audio that it still needs."""
    scored_samples: int
    flushed: int
    flushes: list[FlushDone]
    deferred_events: list[tuple[int, TurnEvent | FlushDone]]
    last_partial: LivePartial
    endpointer: EndpointerState
    silence: SilenceState
    turns: TurnState
    voice_activity: VoiceActivityState
    segments: LiveSegmentStates
    finishing: bool
    input_ended: bool


class SavedLiveSession(NamedTuple):
    """State of a session and its audio."""

    state: LiveSessionState
    pcm: np.ndarray
    """(n,) float32 at 16 kHz, from `state.audio_from` to the last sample that was received."""
