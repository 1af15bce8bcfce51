"""Planner: the smallest number of replicas of each model whose 95th percentile stays under its bound.

Each model is a deployment of its own. Up to CELL_REPLICAS replicas are simulated as they are. A larger plan is made
of cells: the most callers that a cell of CELL_REPLICAS replicas serves are found, and the cell is multiplied. A pool
larger than a cell does not serve fewer callers for each replica, because its queues even out better.
"""

from __future__ import annotations

from math import ceil, inf
from typing import NamedTuple

from asr_serve.errors import OptionError
from asr_serve.planning.mix import Files, Mix, SynthesizedTexts
from asr_serve.planning.service_times import ServiceTimes, UtteranceModelTimes
from asr_serve.planning.simulation import CLASSES, Layout, RequestClass, SimulationResult, simulate

CELL_REPLICAS = 4
"""Most replicas that are simulated together."""
CALLER_SECONDS = 8_000.0
"""Simulated time of all callers together."""
FEWEST_CALLERS, MOST_CALLERS = 7, 133
"""Callers below and above which the simulated time is that of so many: 20 minutes and one, by default."""
DIRECT_CALLERS = 200
"""Callers up to which a cell is not filled first: simulating too many on too few replicas takes long."""
MAX_UTILISATION = 0.9
"""Utilisation above which a queue is not stable for long, whatever a short simulation shows."""
MAX_CALLERS = 100_000_000
SCALES = (100, 1_000_000)
"""Numbers of callers of `--scale`, beside those of one machine."""


class Variant(NamedTuple):
    """Way to run a plan."""

    prefix_affinity: bool
    disaggregated: bool

    @property
    def name(self) -> str:
        affinity = "prefix affinity" if self.prefix_affinity else "no prefix affinity"
        return f"{affinity}, {'encoding apart' if self.disaggregated else 'encoding together'}"


VARIANTS = (Variant(True, False), Variant(False, False), Variant(True, True), Variant(False, True))


class Bounds(NamedTuple):
    """Bound on the 95th percentile of each class, in milliseconds."""

    live: float
    files: float
    speech: float

    def of(self, name: RequestClass) -> float:
        return {"live": self.live, "files": self.files, "speech": self.speech}[name]

    @classmethod
    def of_mix(cls, mix: Mix, p95_ms: float) -> Bounds:
        """The tightest bound of each class of one model's part of a mix."""
        entries = (mix.live, mix.files, mix.speech)
        return cls(*(min((entry.p95_ms or p95_ms for entry in each), default=inf) for each in entries))


class Deployment(NamedTuple):
    """Planned replicas of one model."""

    model: str
    replicas: int
    encoders: int
    """Replicas that only encode, beside `replicas` that decode; 0: the same ones do both."""
    cells: int
    """Cells of which it is made; 1: it was simulated as it is."""
    result: SimulationResult
    """Result of one cell."""

    @property
    def total(self) -> int:
        return self.replicas + self.encoders


class Plan(NamedTuple):
    """Plan for a number of callers."""

    callers: int
    variant: Variant
    deployments: tuple[Deployment, ...]
    machines: int
    cores: int
    gpus: int
    cost_per_hour: float
    audio_s_per_s: float
    """Audio of callers' speech, files and sentences in a second."""

    @property
    def replicas(self) -> int:
        return sum(each.total for each in self.deployments)

    @property
    def cost_per_audio_hour(self) -> float:
        return self.cost_per_hour / self.audio_s_per_s if self.audio_s_per_s else 0.0


class Planner:
    """Plans of one mix on one machine kind."""

    def __init__(
        self,
        mix: Mix,
        table: ServiceTimes,
        p95_ms: float,
        *,
        price_per_hour: float | None = None,
        seed: int = 0,
        caller_seconds: float = CALLER_SECONDS,
    ) -> None:
        """`price_per_hour`: None: that of the table. `caller_seconds`: simulated time of all callers together. Raises
        NotMeasured for a model without service times, OptionError for one of another kind than the mix asks for."""
        self.mix, self.table, self.p95_ms, self.seed, self._caller_seconds = mix, table, p95_ms, seed, caller_seconds
        self.price_per_hour = table.price_per_hour if price_per_hour is None else price_per_hour
        self._parts = {model: mix.of_model(model) for model in mix.models}
        self._bounds = {model: Bounds.of_mix(part, p95_ms) for model, part in self._parts.items()}
        self._cells: dict[tuple[str, Variant], tuple[Layout, float]] = {}
        self._results: dict[tuple[str, Layout, float], SimulationResult] = {}
        self._sizes: dict[tuple[str, int, Variant], tuple[Layout, float]] = {}
        self._limits: dict[tuple[str, Layout], tuple[float, float]] = {}
        """Most callers with whom a layout met its bounds, and fewest with whom it did not, so far."""
        for model, part in self._parts.items():
            speaks = table.model(model).__struct_config__.tag == "speech"
            if speaks != bool(part.speech) or (speaks and (part.live or part.files)):
                raise OptionError(
                    f"{model} in [[{'speech' if part.speech else 'live' if part.live else 'files'}]]",
                    "recognizers in [[live]] and [[files]], voices in [[speech]]",
                    param="mix",
                )

    def variants(self) -> tuple[Variant, ...]:
        """Ways to run that differ for this mix: without repeated audio affinity changes nothing, and only
        encoder-decoder models can be disaggregated."""
        return tuple(each for each in VARIANTS if any(self._own_variant(model, each) == each for model in self._parts))

    def plan(self, callers: int, variant: Variant) -> Plan:
        """Returns the smallest plan. Raises OptionError where no number of replicas meets a bound."""
        deployments = tuple(self._deployment(model, callers, variant) for model in self._parts)
        replicas = sum(each.total for each in deployments)
        machines = self._machines(replicas)
        audio = sum(self._audio_rate(model) for model in self._parts) * callers
        return Plan(
            callers,
            variant,
            deployments,
            machines,
            replicas * self.table.cores_per_replica,
            replicas * self.table.gpus_per_replica,
            machines * self.price_per_hour,
            audio,
        )

    def one_machine(self, variant: Variant) -> Plan | None:
        """Returns the plan for the most callers whose replicas fit on one machine; None where not even one caller's
        do."""

        def fits(callers: int) -> bool:
            return self._machines(self._replicas(callers, variant)) <= 1

        if not fits(1):
            return None
        cells = [self._cell(model, self._own_variant(model, variant)) for model in self._parts]
        a_replica = 1 / sum(cell.total / most for cell, most in cells)
        low, high = 1, max(2, round(a_replica * self.table.replicas_per_machine))
        while fits(high) and high < MAX_CALLERS:
            low, high = high, ceil(high * 1.1)
        while high - low > max(1, low // 20):
            middle = max(low + 1, round(high * 0.9)) if low == 1 else (low + high) // 2
            if fits(middle):
                low = middle
            else:
                high = middle
        return self.plan(low, variant)

    def _machines(self, replicas: int) -> int:
        return ceil(replicas / self.table.replicas_per_machine)

    def _replicas(self, callers: int, variant: Variant) -> int:
        """Replicas of all models."""
        sizes = [self._size(model, callers, self._own_variant(model, variant)) for model in self._parts]
        return sum(_cells_of(layout, cells).total for layout, cells in sizes)

    # --- one model -------------------------------------------------------------------------------------

    def _deployment(self, model: str, callers: int, variant: Variant) -> Deployment:
        layout, cells = self._size(model, callers, self._own_variant(model, variant))
        whole = _cells_of(layout, cells)
        share = callers * layout.total / whole.total
        result = self._simulate(model, layout, share if cells > 1 else callers)
        return Deployment(model, whole.replicas, whole.encoders, ceil(cells), result)

    def _own_variant(self, model: str, variant: Variant) -> Variant:
        """The variant without what changes nothing for this model."""
        repeats = any(entry.repeated for entry in self._parts[model].files)
        splits = isinstance(self.table.model(model), UtteranceModelTimes)
        return Variant(variant.prefix_affinity or not repeats, variant.disaggregated and splits)

    def _size(self, model: str, callers: int, variant: Variant) -> tuple[Layout, float]:
        """Smallest layout that is simulated, and the number of such cells."""
        key = model, callers, variant
        if key not in self._sizes:
            self._sizes[key] = self._new_size(model, callers, variant)
        return self._sizes[key]

    def _new_size(self, model: str, callers: int, variant: Variant) -> tuple[Layout, float]:
        full = self._layout(model, variant, CELL_REPLICAS)
        direct = callers <= DIRECT_CALLERS and self._meets(model, full, callers)
        if direct or callers <= self._cell(model, variant)[1]:
            return self._smallest(model, callers, variant), 1.0
        cell, most = self._cell(model, variant)
        return cell, callers / most

    def _smallest(self, model: str, callers: int, variant: Variant) -> Layout:
        """The smallest layout for callers whom one cell serves."""
        low, high = self._layout(model, variant, 0).total, CELL_REPLICAS
        used = self._simulate(model, self._layout(model, variant, high), callers)
        busy = max(used.utilisation, used.encoder_utilisation)
        middle = max(low, ceil(busy * high / MAX_UTILISATION))  # a guess to begin with
        while low < high:
            middle = min(middle, high - 1)
            if self._meets(model, self._layout(model, variant, middle), callers):
                high = middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        return self._layout(model, variant, high)

    def _cell(self, model: str, variant: Variant) -> tuple[Layout, float]:
        """A full cell, and the most callers that it serves."""
        if (known := self._cells.get((model, variant))) is not None:
            return known
        layout = self._layout(model, variant, CELL_REPLICAS)
        if not self._meets(model, layout, 1):
            raise self._unreachable(model, layout)
        low, high = 0.0, 1.0
        if variant.prefix_affinity:
            while self._meets(model, layout, high) and high < MAX_CALLERS:
                low, high = high, high * min(16.0, max(1.06, MAX_UTILISATION / self._utilisation(model, layout, high)))
        else:  # it serves no more callers
            low = high = self._cell(model, variant._replace(prefix_affinity=True))[1]
            while low > 1 and not self._meets(model, layout, low):
                low, high = max(1.0, 0.94 * low), low
        while high - low > max(0.5, low / 40):
            middle = (low + high) / 2
            under, over = self._utilisation(model, layout, low), self._utilisation(model, layout, high)
            if low and under < MAX_UTILISATION < over:  # where the line between both meets the limit
                share = (MAX_UTILISATION - under) / (over - under)
                middle = low + (high - low) * min(0.9, max(0.1, share))
            if self._meets(model, layout, middle):
                low = middle
            else:
                high = middle
        self._cells[model, variant] = layout, low
        return layout, low

    def _unreachable(self, model: str, layout: Layout) -> OptionError:
        """The error for a bound that not even one caller meets."""
        bounds, alone = self._bounds[model], self._simulate(model, layout, 1)
        found = {name: each.p95_ms for name, each in alone.classes.items() if each.p95_ms > bounds.of(name)}
        told = ", ".join(f"{p95_ms:.0f} ms for {name}" for name, p95_ms in found.items()) or "an overload"
        return OptionError(
            f"{model} on {self.table.machine} misses its bound with one caller: p95 is {told}",
            "a bound above what an idle replica takes",
            "raise --p95-ms, or set p95_ms in the mix",
            param="p95_ms",
        )

    def _layout(self, model: str, variant: Variant, total: int) -> Layout:
        """Layout of so many replicas, 1 or 2 at least; those that encode are as many as their share of the work."""
        times = self.table.model(model)
        if not (variant.disaggregated and isinstance(times, UtteranceModelTimes)):
            return Layout(max(1, total), prefix_affinity=variant.prefix_affinity)
        audio_s, rows = 6.0, 8
        encode_s = times.encode.seconds(4, 4 * audio_s) / 4
        tokens = times.tokens_fixed + times.tokens_per_s * audio_s
        decode_s = tokens * times.decode.seconds(rows) / rows
        total = max(2, total)
        encoders = min(total - 1, max(1, round(total * encode_s / (encode_s + decode_s))))
        return Layout(total - encoders, encoders, variant.prefix_affinity)

    def _meets(self, model: str, layout: Layout, callers: float) -> bool:
        """Returns whether a layout serves so many callers. What fewer callers missed is not tried with more."""
        met, missed = self._limits.get((model, layout), (0.0, inf))
        if met < callers < missed:
            if self._simulated_meets(model, layout, callers):
                met = callers
            else:
                missed = callers
            self._limits[model, layout] = met, missed
        return callers <= met

    def _simulated_meets(self, model: str, layout: Layout, callers: float) -> bool:
        result = self._simulate(model, layout, callers)
        if max(result.utilisation, result.encoder_utilisation) > MAX_UTILISATION:
            return False
        bounds = self._bounds[model]
        return all(each.p95_ms <= bounds.of(name) for name, each in result.classes.items())

    def _utilisation(self, model: str, layout: Layout, callers: float) -> float:
        if not callers:
            return 0.0
        result = self._simulate(model, layout, callers)
        return max(0.01, result.utilisation, result.encoder_utilisation)

    def _simulate(self, model: str, layout: Layout, callers: float) -> SimulationResult:
        key = model, layout, callers
        if (known := self._results.get(key)) is not None:
            return known
        seconds = self._caller_seconds / min(MOST_CALLERS, max(FEWEST_CALLERS, callers))
        result = simulate(self._parts[model], self.table, layout, callers, seconds, seed=self.seed)
        self._results[key] = result
        return result

    def _audio_rate(self, model: str) -> float:
        """Seconds of audio in a second for each caller, as the mix says."""
        part = self._parts[model]
        live = sum(
            entry.share * entry.duty * entry.segment_s / (entry.segment_s + entry.pause_s) for entry in part.live
        )
        timed: list[Files | SynthesizedTexts] = [*part.files, *part.speech]
        hourly = sum(entry.per_caller_per_hour * entry.length_s for entry in timed)
        return live + hourly / 3_600


def _cells_of(cell: Layout, cells: float) -> Layout:
    """Replicas of so many cells."""
    if cells <= 1:
        return cell
    return cell._replace(replicas=ceil(cells * cell.replicas), encoders=ceil(cells * cell.encoders))


def worst_latency(plan: Plan, name: RequestClass) -> tuple[float, float] | None:
    """p50 and p95 of a class, of the model where its p95 is longest; None where nothing of it was simulated."""
    found = [each.result.classes[name] for each in plan.deployments if name in each.result.classes]
    counted = [each for each in found if each.requests]
    if not counted:
        return None
    worst = max(counted, key=lambda each: each.p95_ms)
    return worst.p50_ms, worst.p95_ms


def describe(plan: Plan) -> dict[str, object]:
    """Plan as plain data, for JSON."""
    return {
        "callers": plan.callers,
        "prefix_affinity": plan.variant.prefix_affinity,
        "disaggregated": plan.variant.disaggregated,
        "replicas": plan.replicas,
        "machines": plan.machines,
        "cores": plan.cores,
        "gpus": plan.gpus,
        "cost_per_hour": round(plan.cost_per_hour, 4),
        "cost_per_audio_hour": round(plan.cost_per_audio_hour, 6),
        "audio_s_per_s": round(plan.audio_s_per_s, 3),
        "deployments": [
            {
                "model": each.model,
                "replicas": each.replicas,
                "encoders": each.encoders,
                "cells": each.cells,
                "utilisation": round(each.result.utilisation, 3),
                "encoder_utilisation": round(each.result.encoder_utilisation, 3),
                "classes": {
                    name: {"count": found.requests, "p50_ms": round(found.p50_ms, 1), "p95_ms": round(found.p95_ms, 1)}
                    for name in CLASSES
                    if (found := each.result.classes.get(name)) is not None and found.requests
                },
            }
            for each in plan.deployments
        ],
    }
