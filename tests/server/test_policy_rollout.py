"""Governance in a real server with two real models: a canary under 16 live callers, promotion, regressions that are
injected (an engine that dies, one that is slow, other words), and the way back. No caller loses a word, whichever model
hears it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import Running, eventually
from stream_client import WebSocket, expect_sound, pcm_of, segments
from typer.testing import CliRunner
from websockets.sync.client import connect

from asr_serve.api.cli import app
from asr_serve.config import EngineConfig, GovernanceConfig, ServeConfig
from asr_serve.engine.process.backend import ProcessBackend
from asr_serve.evaluation.store import EvaluatedDataset, EvaluatedSystem, EvaluationResult, EvaluationStore, RunSettings
from asr_serve.governance.audit_log import AuditEntry, verify_log
from asr_serve.governance.routing import caller_position
from asr_serve.models.registry import asr_card
from asr_serve.server.engine_registry import ModelEngine, open_engine

STABLE, CANDIDATE = "moonshine-tiny-en", "vosk-small-en"
ADMIN = {"Authorization": "Bearer boss"}
ROUTE = "/v1/audio/transcriptions"
REQUIRES = """
[route.requires]
dataset = "calls"
wer_percent_below = 20.0
license_in = ["MIT", "Apache-2.0"]
residency = ["eu-central-1"]
"""
RATIO = 2.0
"""Latency of the route `speed`: that of the candidate may be this multiple of the stable model's."""
POLICY = f"""
[[route]]
name = "default"
default = true
stable = "{STABLE}"
candidate = "{CANDIDATE}"
{REQUIRES}
[route.rollout]
stages = ["shadow", "canary"]
shadow_percent = 100
canary_percent = 50
minimum_requests = 2

[route.rollback]
latency_p95_ratio_above = 1000.0
restarts_above = 0
minimum_requests = 3

[[route]]
name = "words"
stable = "{STABLE}"
candidate = "{CANDIDATE}"
{REQUIRES}
[route.rollout]
stages = ["shadow"]
shadow_percent = 100

[route.rollback]
disagreement_percent_above = 1.0
minimum_requests = 2

[[route]]
name = "speed"
stable = "{STABLE}"
candidate = "{CANDIDATE}"
{REQUIRES}
[route.rollout]
stages = ["canary"]
canary_percent = 50

[route.rollback]
latency_p95_ratio_above = {RATIO}
minimum_requests = 3
"""
CALLERS = [f"caller-{number}" for number in range(16)]
IN_CANARY = {caller for caller in CALLERS if caller_position("default", f"anonymous\0{caller}") < 50}


def store_evaluation(file: Path) -> str:
    """An evaluation of the candidate, as asr-serve eval stores it; returns its run."""
    card = asr_card(CANDIDATE)
    system = EvaluatedSystem(CANDIDATE, CANDIDATE, card.weights_revision, card.licence, "none")
    with EvaluationStore(file, create=True) as store:
        run = store.begin_run(system, EvaluatedDataset("calls", "/calls", "d" * 64, "en", 2), RunSettings())
        for path in ("a.wav", "b.wav"):
            store.add_result(run.run_id, EvaluationResult(path, 4.0, "a b", "a b", 10, 1, 40, 2, 0.5))
        store.finish_run(run.run_id)
    return run.run_id


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("policy")
    (found / "policy.toml").write_text(POLICY)
    return found


@pytest.fixture(scope="module")
def run_id(folder: Path) -> str:
    return store_evaluation(folder / "evaluations.sqlite")


@pytest.fixture(scope="module")
def running(folder: Path, run_id: str, packaged_speech: Path) -> Iterator[Running]:
    config = ServeConfig(
        model=STABLE,
        voice="none",
        turn_model="none",
        device="cpu",
        dtype="fp32",
        engine_threads=1,
        admin_keys=("boss",),
        engine=EngineConfig(prefix_bytes=0, new_live_callers=4 * len(CALLERS)),
        governance=GovernanceConfig(
            policy=str(folder / "policy.toml"), audit_log=str(folder / "audit.jsonl"), region="eu-central-1"
        ),
        evaluations=str(folder / "evaluations.sqlite"),
    )
    started = Running(config, open_engine)
    yield started
    started.call(started.engines.close())
    started.stop()


@pytest.fixture(scope="module")
def pcm(cities: Path) -> bytes:
    return pcm_of(cities, 4.0)


def promote(running: Running, to: str, route: str = "default") -> Any:
    return running.http.post(f"/v1/policy/{route}/promote", headers=ADMIN, json={"to": to})


def status(running: Running, route: str = "default") -> Any:
    routes = running.http.get("/v1/policy", headers=ADMIN).json()["routes"]
    return next(each for each in routes if each["name"] == route)


def candidates_engine(running: Running) -> ModelEngine:
    return next(engine for engine in running.engines if engine.name == CANDIDATE)


def send_candidate(running: Running, number: signal.Signals) -> ProcessBackend:
    """Sends a signal to the candidate's engine, and returns its back end."""
    backend = candidates_engine(running).client.backend
    assert isinstance(backend, ProcessBackend)
    assert backend.pid is not None
    os.kill(backend.pid, number)
    return backend


class Callers:
    """Live callers of one route, all at once, none ahead of the others."""

    def __init__(self, running: Running, names: Sequence[str], pcm: bytes, **query: object) -> None:
        self.pcm, self.at = pcm, 0
        self.lines = {name: WebSocket(running.port, {"x-caller-id": name}, **query) for name in names}
        self.models = {name: line.hear("session")["model"] for name, line in self.lines.items()}

    def speak(self, until: float) -> None:
        """Send audio up to that share of it."""
        end = int(len(self.pcm) * until) & ~1
        for at in range(self.at, end, 6_400):
            for line in self.lines.values():
                line.send(self.pcm[at : min(at + 6_400, end)])
                while line.poll():
                    pass
        self.at = end

    def finish(self) -> dict[str, list[tuple[float, float, str]]]:
        """End the audio; every caller's sentences."""
        self.speak(1.0)
        for line in self.lines.values():
            line.end()
        found = {}
        for name, line in self.lines.items():
            events = line.rest()
            assert events[-1]["type"] == "end", events[-1]
            expect_sound(events)
            found[name] = segments(events)
            line.socket.close()
        return found


@pytest.fixture(scope="module")
def alone(running: Running, pcm: bytes) -> dict[str, list[tuple[float, float, str]]]:
    """What each model makes of the audio, with one caller."""
    found = {}
    for model in (STABLE, CANDIDATE):
        found[model] = Callers(running, ["alone"], pcm, model=model).finish()["alone"]
    assert found[STABLE] != found[CANDIDATE]
    assert all(found.values())
    return found


def entries(folder: Path, route: str = "default") -> list[AuditEntry]:
    return [entry for entry in verify_log(folder / "audit.jsonl").entries if entry.route == route]


def test_a_shadow_transcribes_uploads_and_callers_notice_nothing(
    running: Running, folder: Path, run_id: str, cities: Path
) -> None:
    heard = running.http.post(ROUTE, files={"file": cities.read_bytes()}, data={"model": STABLE})
    assert (heard.status_code, heard.headers["x-model"]) == (200, STABLE)
    command = ["policy", "promote", "default", "--to", "shadow", "--reason", "the evaluation is good"]
    done = CliRunner().invoke(app, [*command, "--server", running.url, "--api-key", "boss"])
    assert (done.exit_code, done.stdout) == (0, f"{CANDIDATE} is shadow on route default\n"), done.stderr
    done = CliRunner().invoke(app, ["policy", "status", "--server", running.url, "--api-key", "boss"])
    assert done.exit_code == 0
    assert {"shadow", "canary", STABLE, CANDIDATE, "admin-1"} <= set(done.stdout.split())
    done = CliRunner().invoke(app, ["policy", "rollback", "none", "--server", running.url, "--api-key", "boss"])
    assert (done.exit_code, "there is no route 'none'" in done.stderr) == (1, True)
    refused = promote(running, "canary")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "promotion_refused")
    assert "has finished 0 requests as shadow" in refused.json()["error"]["message"]
    for fields in ({}, {"model": "default"}):
        answer = running.http.post(ROUTE, files={"file": cities.read_bytes()}, data=fields)
        assert (answer.headers["x-model"], answer.json()["text"]) == (STABLE, heard.json()["text"])
    eventually(lambda: status(running)["figures"].get("shadow_clips") == 2)
    figures = status(running)["figures"]
    assert figures["shadow_words"] > 2
    assert 0 < figures["shadow_differences"] < figures["shadow_words"]
    assert running.counted("asr_serve_policy_shadow_words_total", policy_route="default") == figures["shadow_words"]
    promoted = entries(folder)[-1]
    assert (promoted.by, promoted.reason, promoted.stage) == ("admin-1", "the evaluation is good", "shadow")
    assert promoted.operator
    assert promoted.evidence[0]["run_id"] == run_id
    running.expect_empty()


def test_canary_promotion_regression_and_rollback_under_16_callers(
    running: Running, folder: Path, run_id: str, pcm: bytes, alone: dict[str, list[tuple[float, float, str]]]
) -> None:
    assert promote(running, "canary").status_code == 200
    first = Callers(running, CALLERS, pcm)
    assert {name for name, model in first.models.items() if model == CANDIDATE} == IN_CANARY
    assert 4 <= len(IN_CANARY) <= 12, "the test's names are spread"
    assert set(first.models.values()) == {STABLE, CANDIDATE}
    first.speak(0.5)
    # Some end, and then the candidate is promoted in the middle of the others' sentences: they stay with their model.
    done = Callers(running, [*sorted(IN_CANARY)[:2], "caller-none"], pcm).finish()
    assert all(done[name] == alone[CANDIDATE] for name in sorted(IN_CANARY)[:2])
    assert promote(running, "promoted").status_code == 200
    second = Callers(running, CALLERS, pcm)
    assert set(second.models.values()) == {CANDIDATE}
    found = first.finish()
    assert found == {name: alone[first.models[name]] for name in CALLERS}
    second.speak(0.5)

    # The regression: the candidate's engine dies under 16 callers.
    backend = send_candidate(running, signal.SIGKILL)
    eventually(lambda: backend.restarts == 1)
    third = Callers(running, CALLERS, pcm)
    assert set(third.models.values()) == {STABLE}, "nobody asked for it"
    assert status(running)["stage"] == "stable"
    assert second.finish() == dict.fromkeys(CALLERS, alone[CANDIDATE]), "they lose nothing"
    assert third.finish() == dict.fromkeys(CALLERS, alone[STABLE])
    running.expect_empty()

    log = entries(folder)
    assert [(each.action, each.stage) for each in log] == [
        ("adopted", "stable"),
        ("promoted", "shadow"),
        ("promoted", "canary"),
        ("promoted", "promoted"),
        ("rolled_back", "stable"),
    ]
    assert [each.evidence[0]["run_id"] for each in log if each.action == "promoted"] == [run_id] * 3
    assert log[-1].by == "server"
    assert "its engine died 1 times (restarts_above = 0)" in log[-1].reason
    assert log[3].figures["candidate_finished"] >= 2
    counted = running.metrics.registry.get_sample_value
    assert counted("asr_serve_policy_rollbacks_total", {"policy_route": "default", "by": "server"}) == 1
    labels = {"policy_route": "default", "stage": "promoted", "model": CANDIDATE, "outcome": "done"}
    assert counted("asr_serve_policy_requests_total", labels) == 16
    assert counted("asr_serve_policy_stage_routes", {"policy_route": "default", "stage": "stable"}) == 1


def test_every_protocol_comes_to_the_route(running: Running, cities: Path) -> None:
    """And a bad change of a stage is refused, as is one without an admin key."""
    for model in ("default", STABLE):
        assert running.http.get(f"/v1/models/{model}").json()["id"] == STABLE
    assert "default" in running.http.get(f"/v1/models/{STABLE}").json()["aliases"]
    answer = running.http.post("/asr", files={"file": cities.read_bytes()}, data={"model": "default"})
    assert (answer.status_code, answer.headers["x-model"]) == (200, STABLE)
    for path, query in (("/v1/realtime", "?caller_id=x"), ("/", "?model=default"), ("/ws", "?caller_id=x")):
        with connect(f"ws://127.0.0.1:{running.port}{path}{query}") as socket:
            if path == "/v1/realtime":
                assert json.loads(socket.recv())["session"]["audio"]["input"]["transcription"]["model"] == STABLE
    assert running.http.post("/v1/policy/default/promote").status_code == 401
    other = {"Authorization": "Bearer other"}
    assert running.http.get("/v1/policy", headers=other).status_code in (401, 403)
    for route, body, code in (
        ("default", b'{"to": 3}', 400),
        ("default", b"{", 400),
        ("default", b'{"too": "canary"}', 400),
        ("none", b"", 404),
        ("default", b'{"to": "promoted"}', 409),
    ):
        answer = running.http.post(f"/v1/policy/{route}/promote", headers=ADMIN, content=body)
        assert answer.status_code == code, answer.text
    assert running.http.post("/v1/policy/default/rollback", headers=ADMIN).status_code == 409
    answer = running.http.post(f"/v1/models/{CANDIDATE}/unload", headers=ADMIN)
    assert (answer.status_code, "the policy has routes to" in answer.text) == (403, True)


def test_a_shadow_that_writes_other_words_is_rolled_back(
    running: Running, folder: Path, wav: Callable[[float, float], bytes], cities: Path
) -> None:
    """The regression is a model with other weights. As long as there is nothing to hear it agrees, and stays."""
    assert promote(running, "shadow", "words").status_code == 200
    for clips in (1, 2):
        answer = running.http.post(ROUTE, files={"file": wav(0, 2)}, data={"model": "words"})
        assert (answer.headers["x-model"], answer.json()["text"]) == (STABLE, "")
        eventually(lambda clips=clips: status(running, "words")["figures"].get("shadow_clips") == clips)
    assert status(running, "words")["stage"] == "shadow", "it agrees"
    answer = running.http.post(ROUTE, files={"file": cities.read_bytes()}, data={"model": "words"})
    assert (answer.headers["x-model"], len(answer.json()["text"]) > 20) == (STABLE, True)
    eventually(lambda: entries(folder, "words")[-1].action == "rolled_back")
    assert status(running, "words")["stage"] == "stable"
    log = entries(folder, "words")
    assert [(each.action, each.stage, each.by) for each in log[1:]] == [
        ("promoted", "shadow", "admin-1"),
        ("rolled_back", "stable", "server"),
    ]
    figures = log[-1].figures
    assert figures["shadow_clips"] == 3
    assert figures["shadow_differences"] > 0.01 * figures["shadow_words"] > 0
    assert "recordings differ (disagreement_percent_above = 1)" in log[-1].reason
    answer = running.http.post(ROUTE, files={"file": wav(0, 2)}, data={"model": "words"})
    assert answer.headers["x-model"] == STABLE
    assert "shadow_clips" not in status(running, "words")["figures"], "it is asked no more"


def test_a_canary_that_is_slow_is_rolled_back(running: Running, folder: Path, wav: Callable[[float], bytes]) -> None:
    """The regression is an engine whose process stands still for a while, and goes on: no request fails."""
    assert promote(running, "canary", "speed").status_code == 200
    clip = wav(3)

    def upload(caller: str) -> tuple[str, str]:
        headers = {"x-caller-id": caller}
        answer = running.http.post(ROUTE, files={"file": clip}, data={"model": "speed"}, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-model"], answer.json()["text"]

    in_canary = [each for each in CALLERS if caller_position("speed", f"anonymous\0{each}") < 50]
    (stable,) = {upload(next(each for each in CALLERS if each not in in_canary)) for _ in range(3)}
    (usual,) = {upload(in_canary[0]) for _ in range(2)}
    assert (stable[0], usual[0]) == (STABLE, CANDIDATE)
    assert status(running, "speed")["stage"] == "canary"
    baseline_s = status(running, "speed")["figures"]["baseline_upload_latency_p95_s"]
    still_s = RATIO * baseline_s + 0.5
    with ThreadPoolExecutor(1) as pool:
        send_candidate(running, signal.SIGSTOP)
        try:
            slow = pool.submit(upload, in_canary[0])
            time.sleep(still_s)
            assert not slow.done()
        finally:
            send_candidate(running, signal.SIGCONT)
        assert slow.result() == usual, "nothing is lost by it"
    eventually(lambda: entries(folder, "speed")[-1].action == "rolled_back")
    last = entries(folder, "speed")[-1]
    assert (last.by, last.stage) == ("server", "stable")
    assert f"(latency_p95_ratio_above = {RATIO:g})" in last.reason
    assert last.figures["candidate_upload_latency_p95_s"] > still_s
    assert (last.figures["candidate_failed"], last.figures["restarts"]) == (0, 0)
    assert upload(in_canary[0]) == stable
    running.expect_empty()


def test_uploads_of_a_candidate_that_fails_are_transcribed_by_the_stable_model(
    running: Running, folder: Path, wav: Callable[[float], bytes]
) -> None:
    """Also one that is half sent when the engine is gone; and the failures take the candidate back."""
    caller, clip = {"x-caller-id": min(IN_CANARY)}, wav(3)
    expected = running.http.post(ROUTE, files={"file": clip}, data={"model": STABLE}).json()["text"]
    assert promote(running, "shadow").status_code == 200
    for _ in range(2):
        running.http.post(ROUTE, files={"file": clip}, headers=caller)
    eventually(lambda: status(running)["figures"].get("shadow_clips") == 2)
    assert promote(running, "canary").status_code == 200
    by_candidate = running.http.post(ROUTE, files={"file": clip}, headers=caller)
    assert (by_candidate.headers["x-model"], by_candidate.json()["text"] != expected) == (CANDIDATE, True)
    engine = candidates_engine(running)
    form = httpx.Request("POST", f"{running.url}{ROUTE}", files={"file": ("a.wav", clip)})
    body = form.read()

    def parts() -> Iterator[bytes]:
        yield body[: len(body) // 2]
        eventually(lambda: running.gate.active_work == 1 and engine._users == 1)
        engine.client.close()
        yield body[len(body) // 2 :]

    headers = {"content-type": form.headers["content-type"]} | caller
    for content in (parts(), body, body):
        answer = running.http.post(ROUTE, content=content, headers=headers)
        assert (answer.status_code, answer.headers["x-model"]) == (200, STABLE), answer.text
        assert answer.json()["text"] == expected
    assert status(running)["stage"] == "stable"
    eventually(lambda: entries(folder)[-1].action == "rolled_back")
    assert "2 of its last 3 requests failed" in entries(folder)[-1].reason
    running.expect_empty()
