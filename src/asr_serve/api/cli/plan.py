"""`asr-serve plan`: how many replicas a load needs, by simulation with measured service times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from asr_serve.api.cli.exit_codes import exit_on_error
from asr_serve.api.cli.options import whole_number
from asr_serve.api.cli.progress import print_ruled_table
from asr_serve.errors import OptionError

if TYPE_CHECKING:
    from asr_serve.planning.planner import Plan, Planner
    from asr_serve.planning.service_times import ServiceTimes

DEFAULT_MACHINE = "xeon-2c"


@exit_on_error
def plan(
    callers: Annotated[
        int,
        typer.Option(
            metavar="N", help="Callers at once, of all kinds in the mix.", show_default=False, parser=whole_number
        ),
    ],
    mix: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="TOML file that says what callers do (docs/planning.md).", show_default=False
        ),
    ],
    machine: Annotated[
        str, typer.Option(metavar="KIND", help="Machine kind whose service times are used.")
    ] = DEFAULT_MACHINE,
    service_times: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Service times of another machine, as bench/service_times.py writes them, in place of --machine.",
            show_default=False,
        ),
    ] = None,
    p95_ms: Annotated[
        float, typer.Option("--p95-ms", metavar="MS", help="Bound on the 95th percentile, unless the mix has another.")
    ] = 500.0,
    cores: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Cores of one machine, if it has more than the measured one.", show_default=False
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Price of one machine for an hour. Default: that of the table.", show_default=False
        ),
    ] = None,
    scale: Annotated[
        bool, typer.Option("--scale", help="Plan one machine, 100 and 1,000,000 callers as well.")
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the simulation.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Plan capacity: replicas, cores, latency and cost for a number of callers.

    A discrete-event simulation runs the engine's scheduling on service times
    that were measured, and finds the fewest replicas whose 95th percentile
    stays under the bound; with and without prefix affinity, and with encoding
    on replicas of its own. Nothing is loaded and nothing is started.

    \b
    Examples
      asr-serve plan --callers 100 --mix examples/call-centre.toml
      asr-serve plan --callers 500 --mix mix.toml --p95-ms 300 --cores 16 --price 0.8 --scale
      asr-serve plan --callers 100 --mix mix.toml --service-times mine.json --json
    """
    from asr_serve.planning.mix import read_mix
    from asr_serve.planning.planner import MAX_CALLERS, Planner
    from asr_serve.planning.service_times import read_service_times
    from asr_serve.planning.service_times import service_times as packaged_service_times

    if not 1 <= callers <= MAX_CALLERS:
        raise OptionError(f"--callers {callers}", f"1 to {MAX_CALLERS}", param="callers")
    if not 1 <= p95_ms <= 1e7:
        raise OptionError(f"--p95-ms {p95_ms:g}", "1 to 10,000,000", param="p95_ms")
    if price is not None and not 0 <= price <= 1e6:
        raise OptionError(f"--price {price:g}", "0 to 1,000,000", param="price")
    if seed < 0:
        raise OptionError(f"--seed {seed}", "0 or more", param="seed")
    table = packaged_service_times(machine) if service_times is None else read_service_times(service_times)
    if cores is not None:
        table = _with_cores(table, cores)
    planner = Planner(read_mix(mix), table, p95_ms, price_per_hour=price, seed=seed)
    if as_json:
        print(json.dumps(_as_data(planner, callers, scale=scale), indent=1))
    else:
        _print_plans(planner, callers, scale=scale)


def _with_cores(table: ServiceTimes, cores: int) -> ServiceTimes:
    """Table of a machine with more of the same cores, whose price grows with them. Raises OptionError."""
    if not table.cores_per_replica <= cores <= 4_096:
        raise OptionError(f"--cores {cores}", f"{table.cores_per_replica} to 4,096", param="cores")
    price = table.price_per_hour * cores / table.cores
    return msgspec.structs.replace(table, cores=cores, price_per_hour=price)


def _plans(planner: Planner, callers: int, *, scale: bool) -> list[tuple[str, Plan | None, str]]:
    """Returns, for each variant, what was asked, its plan (None: nothing fits on one machine) and its name."""
    from asr_serve.planning.planner import SCALES

    found: list[tuple[str, Plan | None, str]] = []
    asked = list(dict.fromkeys([callers, *(SCALES if scale else ())]))
    for variant in planner.variants():
        if scale:
            found.append(("one machine", planner.one_machine(variant), variant.name))
        found += [(f"{count:,} callers", planner.plan(count, variant), variant.name) for count in asked]
    return found


def _as_data(planner: Planner, callers: int, *, scale: bool) -> dict[str, Any]:
    from asr_serve.planning.planner import describe

    table = planner.table
    return {
        "mix": planner.mix.name,
        "machine": {
            "name": table.machine,
            "description": table.description,
            "measured": table.measured,
            "cores": table.cores,
            "gpus": table.gpus,
            "cores_per_replica": table.cores_per_replica,
            "price_per_hour": planner.price_per_hour,
            "price_source": table.price_source if planner.price_per_hour == table.price_per_hour else "given",
        },
        "p95_ms": planner.p95_ms,
        "seed": planner.seed,
        "plans": [
            {"asked": asked, "plan": None if found is None else describe(found), "variant": variant}
            for asked, found, variant in _plans(planner, callers, scale=scale)
        ],
    }


def _print_plans(planner: Planner, callers: int, *, scale: bool) -> None:
    from asr_serve.planning.planner import worst_latency
    from asr_serve.planning.simulation import CLASSES

    table, plans = planner.table, _plans(planner, callers, scale=scale)
    rows: list[tuple[str, ...]] = []
    for asked, found, variant in plans:
        if found is None:
            rows.append((asked, variant, "-", "more than one machine", "", "", "", "", ""))
            continue
        latencies = [
            "-" if (each := worst_latency(found, name)) is None else f"{each[0]:,.0f} / {each[1]:,.0f}"
            for name in CLASSES
        ]
        rows.append(
            (
                asked if asked != "one machine" else f"one machine: {found.callers:,}",
                variant,
                f"{found.replicas:,}",
                f"{found.machines:,}",
                f"{found.cores:,} / {found.gpus:,}",
                *latencies,
                f"{found.cost_per_audio_hour:.4f}",
            )
        )
    given = "given" if planner.price_per_hour != table.price_per_hour else table.price_source
    print_ruled_table(
        f"{planner.mix.name}: {planner.mix.description}".rstrip(": "),
        (
            "plan",
            "variant",
            "replicas",
            "machines",
            "cores / GPUs",
            "live ms",
            "files ms",
            "speech ms",
            "cost / audio h",
        ),
        rows,
        f"p50 / p95 of finals. Machine {table.machine}, {table.cores} cores, {table.measured}; "
        f"{planner.price_per_hour:g} an hour ({given}). Bound: p95 {planner.p95_ms:g} ms, unless the mix has another.",
    )
    shown = next((found for _, found, _ in plans if found is not None and found.callers == callers), None)
    if shown is None:
        return
    by_model: list[tuple[str, ...]] = [
        (
            each.model,
            f"{each.replicas:,}",
            f"{each.encoders:,}",
            f"{100 * each.result.utilisation:.0f}",
            *(
                f"{result.p95_ms:,.0f}" if (result := each.result.classes.get(name)) and result.requests else "-"
                for name in CLASSES
            ),
        )
        for each in shown.deployments
    ]
    print_ruled_table(
        f"{callers:,} callers by model, {shown.variant.name}",
        ("model", "replicas", "encoders", "utilisation %", *(f"{name} p95 ms" for name in CLASSES)),
        by_model,
    )
