"""What was given to an engine process and is not answered: kept here, audio and all, for the next one."""

from __future__ import annotations

from collections import deque

import msgspec

from asr_serve.engine.session import Utterance, Windows


class Work(msgspec.Struct):
    """An utterance until it is answered."""

    utterance: Utterance
    started: bool = False
    """The process works on it."""
    deaths: int = 0
    """Processes that died while they worked on it."""


class Session:
    """A caller's voice activity: the state after the last answered piece, and the pieces under way."""

    def __init__(self, live: bool) -> None:
        self.live = live
        self.state: bytes | None = None
        self.next_piece = 0
        self.pieces: deque[tuple[int, Windows]] = deque()
        self.deaths = 0

    def put(self, windows: Windows) -> int:
        """The piece's number."""
        piece = self.next_piece
        self.pieces.append((piece, windows))
        self.next_piece += 1
        return piece

    def answered(self, piece: int, state: bytes | None) -> Windows | None:
        """Pieces are answered in order; None for an answer that nobody waits for any more."""
        if not self.pieces or self.pieces[0][0] != piece:
            return None
        self.state = state if state is not None else self.state
        self.deaths = 0
        return self.pieces.popleft()[1]

    def drop(self) -> list[Windows]:
        """Give up what is under way."""
        dropped = [windows for _, windows in self.pieces]
        self.pieces.clear()
        return dropped
