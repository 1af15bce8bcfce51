"""Capacity planning: the simulation against closed forms, the search, mix files, tables, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from asr_serve.api.cli import app
from asr_serve.errors import NotMeasured, OptionError, SourceNotFound
from asr_serve.planning.mix import Files, LiveCallers, Mix, SynthesizedTexts, read_mix
from asr_serve.planning.planner import Planner, Variant, describe
from asr_serve.planning.replicas import (
    SharedCores,
    SpeechReplica,
    StreamingReplica,
    UtteranceReplica,
    VirtualClock,
    Work,
)
from asr_serve.planning.service_times import (
    ServerTimes,
    ServiceTimes,
    SpeechModelTimes,
    StepCost,
    StreamingModelTimes,
    UtteranceModelTimes,
    machine_kinds,
    read_service_times,
    service_times,
)
from asr_serve.planning.simulation import Layout, simulate

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "call-centre.toml"

STREAMING = StreamingModelTimes(
    chunk=StepCost(0.004, 0.001), chunk_s=0.12, lag_s=0.1, wait_s=0.015, max_rows=64, bulk_s=0.96
)
UTTERANCE = UtteranceModelTimes(
    encode=StepCost(0.004, 0.0, 0.002),
    verify=StepCost(0.003, 0.0002),
    decode=StepCost(0.004, 0.0002),
    tokens_per_s=3.0,
    tokens_fixed=2.0,
    accepted=0.7,
    handover=StepCost(0.002),
)
TABLE = ServiceTimes(
    machine="test",
    description="a machine that does not exist",
    cores=8,
    cores_per_replica=1,
    price_per_hour=0.4,
    server=ServerTimes(live_packet_s=0.0005, file_s=0.005, file_audio_factor=0.001),
    models={"streaming": STREAMING, "utterance": UTTERANCE, "voice": SpeechModelTimes(speak=StepCost(0.02, 0.0, 0.05))},
)
STREAMING_MIX = Mix("mix", "", live=(LiveCallers("streaming", 1.0),))
UTTERANCE_MIX = Mix(
    "mix",
    "",
    live=(LiveCallers("utterance", 0.5),),
    files=(Files("utterance", per_caller_per_hour=60, repeated=0.5, distinct=20, p95_ms=5_000),),
)
TOGETHER = Variant(prefix_affinity=True, disaggregated=False)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("kind", ["streaming", "speech"])
def test_waiting_times_are_those_of_an_m_d_1_queue(load: float, kind: str) -> None:
    """Pollaczek and Khinchine: Poisson arrivals that all take D wait load * D / (2 * (1 - load)) on average."""
    clock, service_s, count = VirtualClock(), 0.01, 12_000
    one = msgspec.structs.replace(STREAMING, chunk=StepCost(service_s), max_rows=1)
    replica = (
        StreamingReplica(clock, SharedCores(), one)
        if kind == "streaming"
        else SpeechReplica(clock, SharedCores(), SpeechModelTimes(speak=StepCost(service_s)))
    )
    arrivals = np.cumsum(np.random.default_rng(3).exponential(service_s / load, count)).tolist()
    waits: list[float] = []

    def arrive(at_s: float) -> None:
        replica.submit(Work(0.5, lambda: waits.append(clock.now_s - at_s - service_s)))

    for at_s in arrivals:
        clock.at(at_s, lambda at_s=at_s: arrive(at_s))
    clock.run(arrivals[-1] + 1_000)
    assert len(waits) == count
    assert np.mean(waits) == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.1)
    assert replica.work_s == pytest.approx(count * service_s)
    assert replica.queued_audio_s == pytest.approx(0, abs=1e-6)


def test_one_utterance_takes_its_encoding_and_one_step_for_each_token() -> None:
    clock = VirtualClock()
    replica, ends = UtteranceReplica(clock, SharedCores(), UTTERANCE), []
    replica.submit(Work(4.0, lambda: ends.append(clock.now_s)))
    clock.run(10)
    assert ends == [pytest.approx(0.004 + 0.002 * 4.0 + (2 + 3 * 4) * 0.0042)]
    assert replica.work_s == pytest.approx(ends[0])


def test_utterances_that_come_together_are_one_batch_and_decode_in_one_step() -> None:
    clock = VirtualClock()
    replica, ends = UtteranceReplica(clock, SharedCores(), UTTERANCE), []
    replica.running = True  # both are there before anything runs
    for _ in range(2):
        replica.submit(Work(4.0, lambda: ends.append(clock.now_s), "bulk"))
    replica.running = False
    replica.submit(Work(4.0, lambda: ends.append(clock.now_s), "bulk"))
    clock.run(10)
    assert ends == [pytest.approx(0.004 + 0.002 * 12 + 14 * (0.004 + 3 * 0.0002))] * 3


@pytest.mark.parametrize(("packed", "batches"), [(False, 2), (True, 1)])
def test_short_and_long_utterances_are_one_batch_where_the_device_packs_them(packed: bool, batches: int) -> None:
    clock = VirtualClock()
    times = msgspec.structs.replace(UTTERANCE, packed=packed, decode=StepCost(), encode_audio_s=20.0)
    replica, ends = UtteranceReplica(clock, SharedCores(), times), []
    replica.running = True  # all are there before anything runs
    for audio_s in (1.0, 1.0):
        replica.submit(Work(audio_s, lambda: ends.append(clock.now_s)))
    replica.running = False
    replica.submit(Work(18.0, lambda: ends.append(clock.now_s)))
    clock.run(10)
    assert max(ends) == pytest.approx(batches * 0.004 + 0.002 * 20)


def test_a_request_that_comes_while_rows_decode_waits_for_one_step_only() -> None:
    clock = VirtualClock()
    replica, ends = UtteranceReplica(clock, SharedCores(), UTTERANCE), []
    replica.submit(Work(10.0, lambda: ends.append("long")))
    clock.at(0.0251, lambda: replica.submit(Work(1.0, lambda: ends.append("short"), "live", 100)))
    clock.run(10)
    assert ends == ["short", "long"]


def test_a_cancelled_request_is_not_answered_and_leaves_nothing_behind() -> None:
    clock = VirtualClock()
    for cancel_s in (0.0, 0.005, 0.03):  # it waits; it is encoded; it decodes
        replica, ends = UtteranceReplica(clock, SharedCores(), UTTERANCE), list[int]()
        first, second = Work(4.0, partial(ends.append, 1)), Work(4.0, partial(ends.append, 2))
        replica.submit(first)
        replica.submit(second)
        clock.at(clock.now_s + cancel_s, partial(replica.cancel, second))
        clock.run(clock.now_s + 10)
        assert ends == [1]
        assert replica.queued_audio_s == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "mix", [STREAMING_MIX, UTTERANCE_MIX, Mix("mix", "", speech=(SynthesizedTexts("voice", 600),))]
)
@pytest.mark.parametrize("encoders", [0, 1])
def test_every_arrival_ends(mix: Mix, encoders: int) -> None:
    found = simulate(mix, TABLE, Layout(2, encoders * (mix is UTTERANCE_MIX)), 20, 60)
    assert found.arrived == found.ended > 0
    assert sum(each.requests for each in found.classes.values()) <= found.arrived
    assert 0 < found.utilisation < 1


def test_utilisation_is_the_load() -> None:
    """Sentences: rate times mean work, server work included."""
    mix = Mix("mix", "", speech=(SynthesizedTexts("voice", 3_600, length_s=2.0, length_spread=0.0),))
    found = simulate(mix, TABLE, Layout(4), 12, 300)
    assert found.utilisation == pytest.approx(12 * (0.02 + 0.05 * 2 + 0.005) / 4, rel=0.05)


def test_replicas_that_share_cores_slow_each_other_down() -> None:
    clock, cores, ends = VirtualClock(), SharedCores(1), list[float]()
    times = SpeechModelTimes(speak=StepCost(1.0))
    replicas = [SpeechReplica(clock, cores, times) for _ in range(2)]

    def submit(replica: SpeechReplica) -> None:
        replica.submit(Work(1.0, lambda: ends.append(clock.now_s)))

    clock.at(0.0, lambda: submit(replicas[0]))
    clock.at(0.5, lambda: submit(replicas[1]))
    clock.at(5.0, lambda: submit(replicas[1]))
    clock.run(10)
    assert ends == [1.0, 2.5, 6.0]  # the second had half a core, the third a whole one
    assert (cores.running, cores.share) == (0, 1.0)


def test_shared_cores_cost_time_and_no_work() -> None:
    own, shared = (simulate(UTTERANCE_MIX, TABLE, Layout(4, cores=cores), 40, 120) for cores in (4, 1))
    assert shared.arrived == own.arrived
    assert shared.classes["files"].p95_ms > own.classes["files"].p95_ms
    assert simulate(UTTERANCE_MIX, TABLE, Layout(4), 40, 120) == own


def test_the_path_of_a_final_is_added() -> None:
    server = msgspec.structs.replace(TABLE.server, live_path_s=0.05)
    mix = Mix("mix", "", live=(LiveCallers("streaming", 1.0),))
    before = simulate(mix, TABLE, Layout(1), 1, 300).classes["live"]
    after = simulate(mix, msgspec.structs.replace(TABLE, server=server), Layout(1), 1, 300).classes["live"]
    assert after.requests == before.requests
    assert after.p50_ms == pytest.approx(before.p50_ms + 50, abs=15)


def test_the_simulation_is_deterministic_and_has_a_seed() -> None:
    first, again = (simulate(UTTERANCE_MIX, TABLE, Layout(2), 20, 60) for _ in range(2))
    assert first == again
    assert simulate(UTTERANCE_MIX, TABLE, Layout(2), 20, 60, seed=1) != first


def test_more_replicas_do_not_make_anything_slower() -> None:
    for mix, callers in ((STREAMING_MIX, 150), (UTTERANCE_MIX, 60)):
        results = [simulate(mix, TABLE, Layout(count), callers, 60) for count in (1, 2, 4, 8)]
        used = [each.utilisation for each in results]
        assert used == sorted(used, reverse=True)
        for name in results[0].classes:
            p95_ms = [each.classes[name].p95_ms for each in results]
            assert all(later <= 1.05 * earlier for earlier, later in pairwise(p95_ms)), p95_ms


def test_an_overload_shows() -> None:
    found = simulate(STREAMING_MIX, TABLE, Layout(1), 400, 20)
    assert found.ended < found.arrived
    assert found.classes["live"].p95_ms == float("inf")


def test_prefix_affinity_finds_answers_that_chance_misses() -> None:
    files = Mix("mix", "", files=(Files("utterance", 600, repeated=0.9, distinct=400, length_s=30),))
    on, off = (simulate(files, TABLE, Layout(8, prefix_affinity=affinity), 20, 300) for affinity in (True, False))
    assert on.utilisation < 0.8 * off.utilisation
    assert on.classes["files"].p50_ms < off.classes["files"].p50_ms


def test_plans_are_smallest_and_meet_their_bounds() -> None:
    planner = Planner(UTTERANCE_MIX, TABLE, 300, caller_seconds=1_200)
    (found,) = planner.plan(80, TOGETHER).deployments
    assert found.cells == 1
    assert found.replicas > 1
    assert found.result.classes["live"].p95_ms <= 300
    assert found.result.classes["files"].p95_ms <= 5_000
    one_less = planner._simulate("utterance", Layout(found.replicas - 1), 80)
    too_much = max(one_less.utilisation - 0.9, one_less.classes["files"].p95_ms - 5_000)
    assert max(too_much, one_less.classes["live"].p95_ms - 300) > 0


def test_large_plans_are_cells_and_grow_with_callers() -> None:
    planner = Planner(UTTERANCE_MIX, TABLE, 300, caller_seconds=1_200)
    replicas = [planner.plan(callers, TOGETHER).replicas for callers in (1, 50, 1_000, 100_000, 1_000_000)]
    assert replicas == sorted(replicas)
    assert replicas[0] == 1
    assert replicas[4] == pytest.approx(10 * replicas[3], rel=0.01)
    plan = planner.plan(1_000_000, TOGETHER)
    assert plan.machines == -(-plan.replicas // 8)
    assert plan.cost_per_hour == pytest.approx(0.4 * plan.machines)
    assert plan.cost_per_audio_hour == pytest.approx(plan.cost_per_hour / plan.audio_s_per_s)
    assert describe(plan)["replicas"] == plan.replicas


def test_one_machine_is_full_and_no_fuller() -> None:
    planner = Planner(STREAMING_MIX, TABLE, 300, caller_seconds=1_200)
    plan = planner.one_machine(TOGETHER)
    assert plan is not None
    assert plan.machines == 1
    assert planner.plan(int(1.2 * plan.callers), TOGETHER).machines == 2
    small = msgspec.structs.replace(TABLE, cores=1)
    both = STREAMING_MIX._replace(speech=(SynthesizedTexts("voice", 10),))
    assert Planner(both, small, 500).one_machine(TOGETHER) is None


def test_disaggregated_plans_have_both_roles() -> None:
    planner = Planner(UTTERANCE_MIX, TABLE, 300, caller_seconds=1_200)
    (found,) = planner.plan(80, Variant(prefix_affinity=True, disaggregated=True)).deployments
    assert found.encoders >= 1
    assert found.replicas >= 1
    assert 0 < found.result.encoder_utilisation < 1
    assert {each.name for each in Planner(STREAMING_MIX, TABLE, 300, caller_seconds=1_200).variants()} == {
        TOGETHER.name
    }
    assert len(planner.variants()) == 4


def test_a_bound_below_what_an_idle_replica_takes_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"streaming on test misses its bound with one caller.*raise --p95-ms"):
        Planner(STREAMING_MIX, TABLE, 2).plan(10, TOGETHER)


def test_models_stand_where_they_belong() -> None:
    with pytest.raises(OptionError, match="voices in"):
        Planner(Mix("mix", "", live=(LiveCallers("voice", 1.0),)), TABLE, 500)
    with pytest.raises(NotMeasured, match="did you mean 'streaming'"):
        Planner(Mix("mix", "", live=(LiveCallers("streeming", 1.0),)), TABLE, 500)


MIX_ERRORS = {
    "": r"line 1: a mix of nothing",
    "[[live]\n": r"line 1: .*a TOML file",
    'name = "x"\n': r"line 1, name: the key 'name'.*description",
    "live = 3\n": r"live: 3. tables \[\[live\]\]",
    '[[live]]\nmodel = "a"\n': r"line 1, share: share is missing. a number, 0 to 1",
    '[[live]]\nmodel = "a"\nshare = 2.0\n': r"line 3, share: share = 2.0. a number, 0 to 1",
    '[[live]]\nmodel = "a"\nshare = 0.6\n[[live]]\nmodel = "b"\nshare = 0.6\n': r"line 6, share: .*add up to 1.2",
    '[[live]]\nmodel = "a"\nshare = 1\nduti = 0.5\n': r"line 4, duti: .*did you mean 'duty'",
    '[[files]]\nmodel = "a"\nper_caller_per_hour = 1\nlength_s = 900\n': r"line 1, max_length_s: .*below length_s",
    '[[speech]]\nvoice = "a"\nper_caller_per_hour = "1"\n': r"line 3, .* = '1'. a number, more than 0, up to 100000",
}


@pytest.mark.parametrize("text", MIX_ERRORS)
def test_mistakes_in_a_mix_are_told_with_line_and_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mix.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=MIX_ERRORS[text]) as found:
        read_mix(path)
    assert found.value.param == "mix"
    assert str(path) in str(found.value)


def test_a_mix_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="cannot be read"):
        read_mix(tmp_path / "none.toml")


def test_tables_that_come_along_are_whole() -> None:
    assert machine_kinds()
    for kind in machine_kinds():
        table = service_times(kind)
        assert table.machine == kind
        assert table.price_source
        assert table.gpus == 0
        assert {"vosk-small-en", "moonshine-tiny-en", "whisper-tiny-en", "fastpitch-en"} <= set(table.models)


def test_a_gpu_is_not_measured() -> None:
    with pytest.raises(NotMeasured, match=r"h100 is not measured.*xeon-2c; no GPU.*bench/service_times.py"):
        service_times("h100")


def test_mistakes_in_a_table_are_told_with_their_key(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    data = msgspec.to_builtins(TABLE)
    data["models"]["voice"]["speak"]["fixed_s"] = -1
    path.write_text(json.dumps(data))
    with pytest.raises(OptionError, match=r"models\[\.\.\.\]\.speak\.fixed_s: .*>= 0"):
        read_service_times(path)


def run(*args: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, ["plan", *args])
    assert found.exit_code == code, found.output
    return found.output


def test_the_command_plans_the_example_as_json() -> None:
    found = json.loads(run("--callers", "40", "--mix", str(EXAMPLE), "--price", "2", "--json"))
    assert found["machine"]["price_per_hour"] == 2
    assert found["machine"]["price_source"] == "given"
    assert [each["asked"] for each in found["plans"]] == ["40 callers"] * 4
    first = found["plans"][0]["plan"]
    assert first["replicas"] == sum(each["replicas"] + each["encoders"] for each in first["deployments"])
    assert {each["model"] for each in first["deployments"]} == set(read_mix(EXAMPLE).models)
    assert first["cost_per_hour"] == 2 * first["machines"]


def test_the_command_prints_a_table_of_every_scale(tmp_path: Path) -> None:
    mix, table = tmp_path / "calls.toml", tmp_path / "table.json"
    mix.write_text('[[speech]]\nvoice = "voice"\nper_caller_per_hour = 30\n')
    table.write_bytes(msgspec.json.encode(TABLE))
    args = [
        "--p95-ms",
        "900",
        "--callers",
        "40",
        "--mix",
        str(mix),
        "--service-times",
        str(table),
        "--cores",
        "16",
        "--scale",
    ]
    shown = run(*args)
    for word in ("one machine: ", "40 callers", "100 callers", "1,000,000 callers", "cost / audio h", "0.8 an hour"):
        assert word in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--callers", "0"], "1 to"),
        (["--callers", "10", "--machine", "h100"], "not measured"),
        (["--callers", "10", "--p95-ms", "0"], "1 to"),
        (["--callers", "10", "--cores", "0"], "1 to 4,096"),
        (["--callers", "10", "--price", "-1"], "0 to"),
    ],
)
def test_mistakes_of_the_command_are_usage_errors(args: list[str], message: str) -> None:
    found = CliRunner().invoke(app, ["plan", *args, "--mix", str(EXAMPLE)])
    assert found.exit_code == 2
    assert message in found.output


def test_planning_loads_no_torch() -> None:
    code = "import sys, asr_serve.planning.planner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
