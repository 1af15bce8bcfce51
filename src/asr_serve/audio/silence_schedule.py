"""Silence that ends a segment, as a function of the segment's length.

A short segment needs a long pause, so that a sentence is not cut at a breath; a long segment ends at the next
short pause. Source: FunASR's dynamic VAD tables (vLLM guide, section 7).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from asr_serve.errors import OptionError

_TODO = "give rows like [(5000, 1500), (20000, 800), (inf, 300)], or '5000:1500,20000:800,inf:300' in text"


class SilenceSchedule(msgspec.Struct, frozen=True):
    """Rows of (segment length up to and including this many ms, silence in ms that then ends it).

    Raises  OptionError: no rows, lengths not rising, a negative or fractional silence, no final inf
    """

    rows: tuple[tuple[float, int], ...]

    def __post_init__(self) -> None:
        if not self.rows:
            raise OptionError("the silence schedule is empty", "it needs at least one row, the last up to inf", _TODO)
        above = 0.0
        for up_to_ms, silence_ms in self.rows:
            if not up_to_ms > above:
                raise OptionError(
                    f"the silence schedule goes from {above:g} ms to {up_to_ms:g} ms",
                    "segment lengths must rise from row to row, starting above 0",
                    _TODO,
                )
            if silence_ms < 0:
                raise OptionError(
                    f"the silence schedule asks for {silence_ms} ms of silence", "it must be 0 or more", _TODO
                )
            above = up_to_ms
        if above != math.inf:
            raise OptionError(f"the silence schedule ends at {above:g} ms", "its last row must reach up to inf", _TODO)

    @classmethod
    def parse(cls, rows: Iterable[tuple[float, float]]) -> SilenceSchedule:
        """Build from a plain list in FunASR's form: [(5000, 1500), (20000, 800), (inf, 300)]. Raises OptionError."""
        checked = []
        for row in rows:
            try:
                up_to_ms, silence_ms = (float(number) for number in row)
                whole_ms = int(silence_ms)
            except (TypeError, ValueError, OverflowError) as error:
                raise OptionError(
                    f"{row!r} is no row of a silence schedule", "a row is two numbers, the second finite", _TODO
                ) from error
            if whole_ms != silence_ms:
                raise OptionError(
                    f"the silence schedule asks for {silence_ms} ms of silence", "whole milliseconds only", _TODO
                )
            checked.append((up_to_ms, whole_ms))
        return cls(tuple(checked))

    @classmethod
    def from_text(cls, text: str) -> SilenceSchedule:
        """Parse the text of a command-line option. Raises OptionError.

        >>> SilenceSchedule.from_text("5000:1500,inf:300").rows
        ((5000.0, 1500), (inf, 300))
        """
        if not text.strip():
            return cls(())
        rows = []
        for part in text.split(","):
            numbers = part.split(":")
            try:
                up_to_ms, silence_ms = (float(number) for number in numbers)
            except ValueError as error:
                raise OptionError(
                    f"{part.strip()!r} is no row of a silence schedule", "a row is LENGTH_MS:SILENCE_MS", _TODO
                ) from error
            rows.append((up_to_ms, silence_ms))
        return cls.parse(rows)

    def silence_ms(self, accumulated_ms: float) -> int:
        """The silence that ends a segment of this length."""
        return next(silence_ms for up_to_ms, silence_ms in self.rows if accumulated_ms <= up_to_ms)

    def __str__(self) -> str:
        """Text that `from_text` parses."""
        return ",".join(f"{up_to_ms:.15g}:{silence_ms}" for up_to_ms, silence_ms in self.rows)


OFFLINE_SCHEDULE = SilenceSchedule(
    # The source gives "200-400 ms" for 45-60 s. Read here as a ramp between its neighbours, 600 before and
    # 100 after: 400 for the first half, 200 for the second. Long segments lose fewer words at their edges.
    ((10_000, 2_000), (20_000, 1_000), (30_000, 800), (45_000, 600), (52_500, 400), (60_000, 200), (math.inf, 100))
)
"""Schedule for whole files, which keeps segments long."""

STREAMING_SCHEDULE = SilenceSchedule(
    ((5_000, 2_000), (10_000, 1_500), (15_000, 1_000), (30_000, 800), (45_000, 400), (math.inf, 100))
)
"""Schedule for live audio, which finalizes text soon."""
