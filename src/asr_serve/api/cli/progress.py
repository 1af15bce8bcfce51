"""Progress of a transcription: seconds of audio done, speed in times real time, time left."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from asr_serve.units import samples_to_s


class ProgressMeter:
    """Progress figures, by a clock of wall seconds that starts with the work, not with loading the model."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s: float | None = None
        self.audio_samples = 0
        self.total_samples: int | None = None

    def start(self) -> None:
        self._started_s = self._clock()

    def update(self, audio_samples: int, total_samples: int | None) -> None:
        self.audio_samples, self.total_samples = audio_samples, total_samples

    @property
    def wall_s(self) -> float:
        return 0.0 if self._started_s is None else self._clock() - self._started_s

    @property
    def audio_s(self) -> float:
        return samples_to_s(self.audio_samples)

    @property
    def speed(self) -> float | None:
        """Seconds of audio per second of wall time; None before there is anything to divide."""
        wall_s = self.wall_s
        return self.audio_s / wall_s if self.audio_samples and wall_s > 0 else None

    @property
    def left_s(self) -> float | None:
        """Seconds left at this speed; None while the total is unknown."""
        speed = self.speed
        if speed is None or self.total_samples is None:
            return None
        return samples_to_s(max(0, self.total_samples - self.audio_samples)) / speed

    def describe(self) -> str:
        """Returns `63.0 of 120.0 s of audio, 31.5 x real time, 0:02 left`, without what is unknown."""
        total = "" if self.total_samples is None else f" of {samples_to_s(self.total_samples):.1f}"
        parts = [f"{self.audio_s:.1f}{total} s of audio"]
        if (speed := self.speed) is not None:
            parts.append(f"{speed:.1f} x real time")
        if (left_s := self.left_s) is not None:
            parts.append(f"{clock_time(left_s)} left")
        return ", ".join(parts)

    def describe_done(self) -> str:
        """Returns `63.0 s of audio in 2.0 s, 31.5 x real time`."""
        speed = self.speed
        times = "" if speed is None else f", {speed:.1f} x real time"
        return f"{self.audio_s:.1f} s of audio in {self.wall_s:.1f} s{times}"


class ProgressBar:
    """Meter as a bar on stderr; nothing is shown if `shown` is false or stderr is no terminal.

    stdout belongs to results: they are written inside `paused()`, so that on a shared terminal the bar makes room
    and returns below them. `stdout_shared`: whether stdout is that terminal.
    """

    def __init__(
        self,
        meter: ProgressMeter,
        *,
        shown: bool = True,
        console: Console | None = None,
        stdout_shared: bool | None = None,
    ) -> None:
        self.meter = meter
        self._stdout_shared = sys.stdout.isatty() if stdout_shared is None else stdout_shared
        self._console = Console(stderr=True) if console is None else console
        self._rich = (
            RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                console=self._console,
                transient=True,
                refresh_per_second=4,
                redirect_stdout=False,  # rich would send results to stderr
                redirect_stderr=False,
            )
            if shown and self._console.is_terminal
            else None
        )
        self._task = self._rich.add_task("loading the model", total=None) if self._rich else None

    def __enter__(self) -> Self:
        if self._rich:
            self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._rich:
            self._rich.stop()

    def update(self, audio_samples: int, total_samples: int | None) -> None:
        self.meter.update(audio_samples, total_samples)
        if self._rich and self._task is not None:
            self._rich.update(
                self._task, completed=audio_samples, total=total_samples, description=self.meter.describe()
            )

    @contextlib.contextmanager
    def paused(self, *, stderr: bool = False) -> Iterator[None]:
        """Hides the bar inside, if output there would collide with it."""
        if self._rich is None or not (stderr or self._stdout_shared):
            yield
            return
        self._rich.stop()
        try:
            yield
        finally:
            self._rich.start()


def clock_time(seconds: float) -> str:
    """Formats seconds as `0:07`, `12:00`, `1:02:03`, rounded up."""
    whole = int(-(-seconds // 1))
    hours, rest = divmod(whole, 3_600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class WorkProgress:
    """Progress of work in parts: a bar on stderr where that is a terminal, else a line for each part, by `say`."""

    def __init__(self, say: Callable[[str], None], *, shown: bool = True, console: Console | None = None) -> None:
        self._say, self._shown, self._part = say, shown, ""
        console = Console(stderr=True) if console is None else console
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self._rich = RichProgress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = self._rich.add_task("", total=1.0) if self._rich else None

    def __enter__(self) -> Self:
        if self._rich and self._shown:
            self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._rich:
            self._rich.stop()

    def update(self, share: float, part: str, more: str = "") -> None:
        """`more`: details of the part."""
        if not self._shown:
            return
        if self._rich and self._task is not None:
            self._rich.update(self._task, completed=share, description=", ".join(filter(None, (part, more))))
        elif part != self._part:
            self._say(f"{part} ...")
        self._part = part


def print_ruled_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], caption: str = "") -> None:
    """Prints a table on stdout: the first column is text, the others are figures. A pipe gets it whole, without
    colours."""
    table = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*row)
    console = Console(file=sys.stdout, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 160
    console.print(table)
