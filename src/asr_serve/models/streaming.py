"""What a streaming recogniser offers: state that is declared, and one step that takes a chunk of many sessions.

A session's audio is cut into encoder frames of `frame_samples`. A step takes the same number of frames, a
chunk, of every session in it, wherever each of them stands. What a session must remember between steps lies in
its row of tensors that somebody else owns (`engine/states`): a step reads and writes rows in place, and keeps
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from asr_serve.types import Found as Found
from asr_serve.types import Guess as Guess
from asr_serve.types import Token as Token

FOREVER = 1 << 62
"""Length in samples of a session that goes on."""


class StateSpec(NamedTuple):
    """One tensor of state: `shape` of a session's row."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    fresh: float | None = 0.0
    """What a new session's row is filled with. None: with nothing, for no step reads what the session itself has
    not written."""
    on_host: bool = False
    """It lies in the host's memory, whatever the device."""


State = Mapping[str, Tensor]
"""By name (slots + 1, *shape). The last row belongs to nobody: rows that only fill up a batch point there."""


class Chunk(NamedTuple):
    """The input of a step: n rows."""

    pcm: Tensor
    """(n, window_samples) float32. Zeros where the session has no audio: before its start, and after its end."""
    rows: Tensor
    """(n,) int64: each session's row of the state."""
    seen: Tensor
    """(n,) int64: encoder frames of the session before this chunk."""
    frames: Tensor
    """(n,) int64: how many of the chunk's frames the session has. Fewer than the chunk only at its end."""
    ends: Tensor
    """(n,) int64: length of the session's audio in samples, FOREVER while it goes on."""


class Window(NamedTuple):
    """Which samples a chunk that begins with encoder frame s needs: `samples` of them, from s * frame_samples -
    `before` on."""

    before: int
    samples: int


class StreamingModel(Protocol):
    """`Model` of a streaming model file. Made as Model(config, tensors, device), as other recognisers are."""

    frame_samples: int
    """From one encoder frame to the next."""
    block: int
    """Encoder frames that see each other. Chunks are multiples of it: the numbers are the same for any."""
    vocab: int
    """With the blank."""
    blank: int
    heads: tuple[str, ...]
    """Of ctc, rnnt, tdt: the first is the one to use unless told."""

    def frames(self, samples: int) -> int:
        """Encoder frames of so many samples, the session over."""

    def window(self, chunk: int) -> Window:
        """For a chunk of so many encoder frames."""

    def state(self, chunk: int) -> dict[str, StateSpec]:
        """What the encoder remembers, when no step is longer than `chunk`."""

    def step(self, chunk: Chunk, state: State) -> Tensor:
        """Encoder output (n, chunk, width); past a row's `frames` it may be anything. Rows of one step differ, but
        for those that point at the last row of the state."""

    def ctc(self, hidden: Tensor) -> Tensor:
        """(n, frames, width) -> natural-log probabilities (n, frames, vocab) float32, contiguous."""


class Transducer(Protocol):
    """What a streaming model with the head rnnt or tdt has besides: predictor and joint network."""

    durations: tuple[int, ...]
    """tdt: frames that a token may last. rnnt: ()."""

    def predictor_state(self) -> dict[str, StateSpec]:
        """What the predictor remembers."""

    def predict(self, tokens: Tensor, memory: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """One token of each row further: tokens (n,) int64, blank for the start; memory by name (n, *shape).
        Returns the predictor's output (n, width) and the memory after; what was passed in is left as it was."""

    def project(self, hidden: Tensor) -> Tensor:
        """The encoder's half of the joint network, (n, frames, width) -> (n, frames, joint width)."""

    def joint(self, projected: Tensor, predicted: Tensor) -> Tensor:
        """Row i of each: `projected` (n, joint width), `predicted` (n, width) -> logits (n, vocab + durations)
        float32; tokens first."""


class Search(Protocol):
    """Encoder output to tokens, chunk by chunk. What it remembers of a session lies in rows of state too."""

    def state(self) -> dict[str, StateSpec]:
        """What it remembers of a session: a fixed size, however long that lasts."""

    def step(self, hidden: Tensor, chunk: Chunk, state: State) -> list[Found]:
        """`hidden` (n, frames, width) of `chunk`; one Found for each row of it."""

    def finish(self, row: int, state: State) -> list[Guess]:
        """The session at that row is over: what may still be said after all that was fixed, best first, at least
        one."""


@runtime_checkable
class Remembering(Search, Protocol):
    """A search that keeps more of a session than its row holds, for what it keeps grows."""

    def keeps(self, row: int) -> tuple[bytes, Tensor]:
        """That, as numbers of its own and one tensor."""

    def keep(self, row: int, numbers: bytes, tensor: bytes, seen: int, device: torch.device) -> None:
        """The inverse, of a session that has so many frames behind it. Raises ValueError."""

    def forget(self, row: int) -> None:
        """The session at that row is gone."""
