"""/v1/evaluations: figures, clips and recordings of asr-serve eval, to those who may see them. No model is loaded."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from stored_evaluations import store_evaluations

from asr_serve import __version__
from asr_serve.config import ServeConfig
from asr_serve.evaluation.store import EvaluationStore
from asr_serve.metrics import ServerMetrics
from asr_serve.server.app import create_app
from asr_serve.server.engine_registry import EngineRegistry
from asr_serve.server.middleware.admission import AdmissionController

URL = "/v1/evaluations"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    store_evaluations(folder)
    return folder


@pytest.fixture
def file(folder: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copy(folder / "e.sqlite", tmp_path / "copy.sqlite"))


@pytest.fixture
async def ask() -> AsyncIterator[Callable[..., httpx.AsyncClient]]:
    """`ask(path, api_keys=(...,))`: somebody who asks a server with that file of evaluations."""
    made: list[httpx.AsyncClient] = []

    def come(path: Path | None, **settings: Any) -> httpx.AsyncClient:
        config = ServeConfig(evaluations=None if path is None else str(path), **settings)
        metrics = ServerMetrics(__version__)
        app = create_app(config, EngineRegistry(config), metrics, AdmissionController(config))
        made.append(httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://evaluations.test"))
        return made[-1]

    yield come
    for each in made:
        await each.aclose()


async def problem(coming: Any) -> tuple[int, str, str]:
    answer = await coming
    told = answer.json()["error"]
    return answer.status_code, told["code"], told["message"]


async def test_runs_have_the_figures_of_the_store(ask, folder):
    me = ask(folder / "e.sqlite")
    listed = (await me.get(URL)).json()
    with EvaluationStore(folder / "e.sqlite") as store:
        (failed, fast, slow) = store.summaries()
    assert (listed["object"], listed["total"]) == ("list", 3)
    assert [each["run_id"] for each in listed["data"]] == [failed.run_id, fast.run_id, slow.run_id]
    assert [listed["data"][1][name] for name in ("wer", "wer_low", "rtfx")] == [fast.wer, fast.wer_low, fast.rtfx]
    second = (await me.get(URL, params={"limit": 1, "offset": 1})).json()
    assert (second["data"], second["total"]) == ([listed["data"][1]], 3)
    assert (await me.get(URL, params={"offset": 9})).json()["data"] == []


async def test_clips_come_in_order_with_their_differences(ask, folder):
    me = ask(folder / "e.sqlite")
    fast = (await me.get(URL)).json()["data"][1]
    found = (await me.get(f"{URL}/{fast['run_id']}")).json()
    assert (found["evaluation"], found["total"]) == (fast, 3)
    (worst, *_) = found["data"]
    assert (worst["path"], worst["word_errors"], worst["words"]) == ("one.wav", 3, 7)
    assert worst["differences"][1] == ["substitute", "cat", "dog"]
    for order, paths in (
        ("path", ["one.wav", "three.wav", "two.wav"]),
        ("errors", ["one.wav", "three.wav", "two.wav"]),
        ("error_rate", ["three.wav", "one.wav", "two.wav"]),
        ("slowest", ["one.wav", "three.wav", "two.wav"]),
        ("longest", ["one.wav", "three.wav", "two.wav"]),
    ):
        rows = (await me.get(f"{URL}/{fast['run_id']}", params={"order": order})).json()["data"]
        assert [row["path"] for row in rows] == paths, order
    page = (await me.get(f"{URL}/{fast['run_id']}", params={"limit": 1, "offset": 1})).json()
    assert ([row["path"] for row in page["data"]], page["total"]) == (["three.wav"], 3)


async def test_a_recording_is_sent_if_it_is_here(ask, folder):
    me = ask(folder / "e.sqlite")
    failed, fast, _ = (await me.get(URL)).json()["data"]
    answer = await me.get(f"{URL}/{fast['run_id']}/audio", params={"path": "one.wav"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/wav")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.content == (folder / "one.wav").read_bytes()
    gone = me.get(f"{URL}/{failed['run_id']}/audio", params={"path": "gone.wav"})
    assert (await problem(gone))[:2] == (404, "clip_audio_missing")
    for path in ("e.sqlite", "../one.wav", str(folder / "one.wav"), ""):  # none is a clip of that run
        other = me.get(f"{URL}/{fast['run_id']}/audio", params={"path": path})
        assert (await problem(other))[:2] == (404, "unknown_evaluation"), path


async def test_a_store_cannot_name_other_files(ask, file):
    with sqlite3.connect(file) as db:
        db.execute("UPDATE results SET path = '/etc/passwd' WHERE path = 'one.wav'")
    db.close()
    me = ask(file)
    run_id = (await me.get(URL)).json()["data"][1]["run_id"]
    assert (await problem(me.get(f"{URL}/{run_id}/audio", params={"path": "/etc/passwd"})))[:2] == (
        404,
        "clip_audio_missing",
    )


async def test_without_a_store(ask, tmp_path):
    status, code, message = await problem(ask(None).get(URL))
    assert (status, code) == (404, "no_evaluations")
    assert "asr-serve eval run" in message
    me = ask(tmp_path / "later.sqlite")
    assert (await problem(me.get(URL)))[:2] == (404, "no_evaluations")
    EvaluationStore(tmp_path / "later.sqlite", create=True).close()
    assert (await me.get(URL)).json() == {"data": [], "total": 0, "object": "list"}
    assert (await problem(me.get(f"{URL}/none")))[:2] == (404, "unknown_evaluation")


async def test_a_damaged_store(ask, file, folder):
    me = ask(file)
    assert (await me.get(URL)).json()["total"] == 3
    whole = file.read_bytes()
    for damaged in (b"not a database, but long enough. " * 99, whole[:4_096] + bytes(len(whole) - 4_096)):
        other = file.with_name("other")
        other.write_bytes(damaged)
        other.replace(file)
        assert (await problem(me.get(URL)))[:2] == (503, "evaluations_unreadable")
    other.write_bytes(whole)
    other.replace(file)
    assert (await me.get(URL)).json()["total"] == 3  # it is looked at again


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"limit": 201}, {"limit": "x"}, {"offset": -1}])
async def test_wrong_pages(ask, folder, wrong):
    status, code, message = await problem(ask(folder / "e.sqlite").get(URL, params=wrong))
    assert (status, code) == (400, "option_error")
    assert next(iter(wrong)) in message


async def test_an_unknown_order(ask, folder):
    me = ask(folder / "e.sqlite")
    assert (await problem(me.get(f"{URL}/x", params={"order": "worst"})))[:2] == (400, "option_error")


async def test_who_may_see_them(ask, folder):
    """A key, where keys are set; an administrator's, where there are any: the recordings may be of real callers."""
    with_keys = ask(folder / "e.sqlite", api_keys=("user",))
    assert (await problem(with_keys.get(URL)))[:2] == (401, "invalid_api_key")
    assert (await with_keys.get(URL, headers={"Authorization": "Bearer user"})).status_code == 200
    with_admins = ask(folder / "e.sqlite", api_keys=("user",), admin_keys=("boss",))
    run_id = (await with_admins.get(URL, headers={"Authorization": "Bearer boss"})).json()["data"][1]["run_id"]
    for path in (URL, f"{URL}/{run_id}", f"{URL}/{run_id}/audio?path=one.wav"):
        refused = with_admins.get(path, headers={"Authorization": "Bearer user"})
        assert (await problem(refused))[:2] == (403, "not_allowed"), path
        assert (await with_admins.get(path, headers={"Authorization": "Bearer boss"})).status_code == 200, path
