"""What audio is known by where it is remembered. It takes reading all of it, and so is done where it comes from
and not on the loop's thread."""

from __future__ import annotations

import msgspec
import numpy as np

from asr_serve.engine.prefix.digest import of_audio
from asr_serve.engine.session import Utterance, Windows

NOTHING = np.empty(0, np.float32)
_options = msgspec.msgpack.Encoder().encode


def name(utterance: Utterance) -> Utterance:
    """By its audio, and by the answer that it wants: what the two are named alike by is answered alike. Of a draft
    only what is fixed can change an answer."""
    assert utterance.pcm is not None
    utterance.heard = of_audio(utterance.pcm)
    fixed = utterance.draft.tokens[: utterance.draft.fixed]
    utterance.wanted = of_audio(NOTHING, utterance.heard, utterance.samples, _options(utterance.options), fixed)
    return utterance


def name_windows(windows: Windows) -> Windows:
    windows.heard = of_audio(windows.pcm)
    return windows


def of_state(state: bytes) -> bytes:
    """A row that somebody brings."""
    return of_audio(np.frombuffer(state, np.uint8))


def chained(before: bytes, heard: bytes) -> bytes:
    """What a caller's voice activity depends on: all pieces up to this one."""
    return of_audio(NOTHING, before, heard)
