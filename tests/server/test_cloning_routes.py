"""/v1/voices: who may, what is refused, the queue, and what becomes of clonings whatever happens to their
process."""

from __future__ import annotations

import asyncio
import io
import json
import os
import wave
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from running_server import Running, eventually

from asr_serve.config import EngineConfig
from asr_serve.errors import AtCapacity, EngineClosed
from asr_serve.server.voices import cloning_queue
from asr_serve.server.voices.upload_folders import FOLDER_PREFIX, UploadFolder, remove_stale_folders
from asr_serve.voices.cloned_voice import EXAMPLE
from asr_serve.voices.voice_store import VoiceStore

WORKER = str(Path(__file__).with_name("fake_cloning_worker.py"))
BOSS, USER = "secret-boss", "secret-user"
ADMIN = {"authorization": f"Bearer {BOSS}"}


def tone(seconds: float = 0.3) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((3_000 * np.sin(np.arange(int(16_000 * seconds)) / 9)).astype(np.int16).tobytes())
    return made.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("voices")


@pytest.fixture(scope="module")
def running(serve: Callable[..., Running], folder: Path) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cloning_queue.CloningQueue.__init__, "__defaults__", ((WORKER,),))
        patch.setattr(cloning_queue, "STOP_S", 0.5)
        yield serve(api_keys=(USER,), admin_keys=(BOSS,), engine=EngineConfig(voices_dir=str(folder)))


@pytest.fixture
def server(running: Running, folder: Path) -> Iterator[Running]:
    yield running
    for job in listed(running):
        running.http.delete(f"/v1/voices/jobs/{job['id']}", headers=ADMIN)
    store = VoiceStore(folder)
    for name in store.names():
        store.delete(name)
    assert not [path for path in Path(os.environ.get("TMPDIR", "/tmp")).glob("asr-serve-clone-*") if path.is_dir()]
    running.expect_empty()


def ask(server: Running, names: tuple[str, ...] = ("a.wav",), **fields: Any) -> httpx.Response:
    form = {"name": "ada", "consent": EXAMPLE, **fields}
    files = [("files", (name, tone(), "audio/wav")) for name in names]
    sent = {name: value for name, value in form.items() if value is not None}
    return server.http.post("/v1/voices", data=sent, files=files, headers=ADMIN)


def listed(server: Running) -> list[dict[str, Any]]:
    return list(server.http.get("/v1/voices/jobs", headers=ADMIN).json()["data"])


def look(server: Running, job: dict[str, Any]) -> dict[str, Any]:
    return dict(server.http.get(f"/v1/voices/jobs/{job['id']}", headers=ADMIN).json())


def over(server: Running, job: dict[str, Any]) -> dict[str, Any]:
    eventually(lambda: look(server, job)["state"] in cloning_queue.OVER, lambda: str(look(server, job)))
    return look(server, job)


def test_a_voice_is_cloned_and_managed(server, folder):
    answer = ask(server, ("one.wav", "sub/two.wav"), texts="one|This is one.", seed="7")
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert (job["object"], job["name"], job["files"], job["error"]) == ("voice.cloning", "ada", 2, None)
    done = over(server, job)
    assert done["state"] == "done"
    assert done["progress"]["share"] == 1
    assert [clip["clip"] for clip in done["clips"]] == ["one.wav", "two.wav"]
    assert done["voice"]["consent"]["statement"] == EXAMPLE
    assert done["voice"]["consent"]["by"] == "admin-1"
    assert done["begun"] is not None
    assert done["ended"] is not None
    card = VoiceStore(folder).card("ada")
    assert card.seed == 7
    assert "This is one." in card.release, "texts came by the recordings' names"

    (voice,) = server.http.get("/v1/voices", headers=ADMIN).json()["data"]
    assert (voice["name"], voice["similarity"]) == ("ada", 0.8)
    (seen,) = server.http.get("/v1/voices", headers={"authorization": f"Bearer {USER}"}).json()["data"]
    assert seen["consent"] is None, "who agreed is for administrators"
    renamed = server.http.patch("/v1/voices/ada", json={"name": "grace"}, headers=ADMIN)
    assert renamed.json()["name"] == "grace"
    assert server.http.get("/v1/voices/ada", headers=ADMIN).status_code == 404
    zipped = server.http.get("/v1/voices/grace/export", headers=ADMIN)
    assert zipped.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(zipped.content)) as parts:
        assert EXAMPLE in parts.read("CONSENT.txt").decode()
    assert server.http.delete("/v1/voices/grace", headers=ADMIN).json()["name"] == "grace"
    assert server.http.get("/v1/voices", headers=ADMIN).json()["data"] == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/voices"),
        ("PATCH", "/v1/voices/ada"),
        ("DELETE", "/v1/voices/ada"),
        ("GET", "/v1/voices/ada/export"),
        ("GET", "/v1/voices/jobs"),
        ("GET", "/v1/voices/jobs/clone_1"),
        ("DELETE", "/v1/voices/jobs/clone_1"),
        ("GET", "/v1/voices/jobs/clone_1/events"),
    ],
)
def test_administrators_only(server, method, path):
    assert server.http.request(method, path).status_code == 401
    answer = server.http.request(method, path, headers={"authorization": f"Bearer {USER}"})
    assert answer.status_code == 403
    assert "administrators" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"consent": None}, "consent", "missing_option"),
        ({"consent": "yes"}, "consent", "option_error"),
        ({"name": None}, "name", "missing_option"),
        ({"name": "../x"}, "name", "option_error"),
        ({"name": "jobs"}, "name", "option_error"),
        ({"model": "moonshine-tiny-en"}, "model", "unsupported_option"),
        ({"minutes": "0"}, "minutes", "option_error"),
        ({"minutes": "a lot"}, "minutes", "option_error"),
        ({"seed": "1.5"}, "seed", "option_error"),
        ({"minuets": "5"}, "minuets", "option_error"),
        ({"texts": "b|Of a recording that did not come."}, "texts", "option_error"),
        ({"texts": "no text"}, "texts", "option_error"),
        ({"moddel": "fastpitch-en"}, "moddel", "option_error"),
    ],
)
def test_what_is_refused_at_once(server, fields, param, code):
    answer = ask(server, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["code"] == code
    assert not [job for job in listed(server) if job["state"] in ("waiting", "running")]


def test_an_unknown_model(server):
    assert ask(server, model="fastpich-en").status_code == 404


@pytest.mark.parametrize("letter", ["語", "\U00020000"], ids=["3 bytes", "4 bytes"])
def test_long_file_names_are_taken_or_refused_with_the_reason(server, letter):
    """80 letters of CJK are up to 320 bytes, and a disk takes 255."""
    answer = ask(server, (f"{letter * 80}.wav",))
    if letter == "語":
        assert answer.status_code == 202
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "malformed_request")
        assert "file name" in answer.json()["error"]["message"]


def test_recordings_there_must_be(server):
    answer = server.http.post(
        "/v1/voices", data={"name": "ada", "consent": EXAMPLE}, files=[("other", ("a.wav", b"x"))], headers=ADMIN
    )
    assert answer.status_code == 400
    assert "files" in answer.text
    answer = server.http.post(
        "/v1/voices", files=[("name", (None, "ada")), ("consent", (None, EXAMPLE))], headers=ADMIN
    )
    assert answer.json()["error"]["param"] == "files"
    answer = server.http.post(
        "/v1/voices", data={"name": "ada", "consent": EXAMPLE}, files=[("files", ("a.wav", b"x" * 99))], headers=ADMIN
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "not_audio"


@pytest.mark.parametrize("name", ["empty.wav", "日本 語.wav", "it's.wav"])
def test_an_empty_recording_is_refused_by_the_name_that_its_client_gave(server, name):
    answer = server.http.post(
        "/v1/voices", data={"name": "ada", "consent": EXAMPLE}, files=[("files", (name, b""))], headers=ADMIN
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("empty_audio", "files")
    assert name in error["message"]
    assert FOLDER_PREFIX not in error["message"]
    assert "000-" not in error["message"]
    answer = server.http.post("/v1/voices", json={"name": "ada"}, headers=ADMIN)
    assert answer.status_code == 400


def test_a_name_that_is_taken(server):
    over(server, ask(server).json())
    again = ask(server)
    assert again.status_code == 400
    assert "already" in again.json()["error"]["message"]
    own = ask(server, name="heart")
    assert own.status_code == 400
    assert "own" in own.json()["error"]["message"]


def test_one_at_a_time_in_their_order(server):
    first = ask(server, ("wait.wav",), name="first").json()
    second, third = (ask(server, name=name).json() for name in ("second", "third"))
    eventually(lambda: look(server, first)["state"] == "running")
    assert [look(server, job)["ahead"] for job in (second, third)] == [1, 2]
    twice = ask(server, name="third")
    assert twice.status_code == 400
    assert "already" in twice.json()["error"]["message"]
    assert [job["name"] for job in listed(server)][:3] == ["third", "second", "first"]
    cancelled = server.http.delete(f"/v1/voices/jobs/{first['id']}", headers=ADMIN).json()
    assert cancelled["state"] == "cancelled"
    assert over(server, second)["state"] == over(server, third)["state"] == "done"


def test_a_full_queue_says_when(server):
    jobs = [ask(server, ("wait.wav",), name=f"v{number}").json() for number in range(1 + cloning_queue.MAX_QUEUED)]
    full = ask(server, name="one-more")
    assert full.status_code == 429
    assert full.json()["error"]["code"] == "at_capacity"
    assert int(full.headers["retry-after"]) >= 1
    for job in reversed(jobs):
        assert server.http.delete(f"/v1/voices/jobs/{job['id']}", headers=ADMIN).json()["state"] == "cancelled"


def test_what_went_wrong_is_told(server):
    bad = over(server, ask(server, ("bad.wav",)).json())
    assert (bad["state"], bad["error"]["code"]) == ("failed", "too_few_clips")
    assert bad["error"]["message"] == "1 good clips. Left out: bad.wav: noise", "by its own name, without a folder"
    died = over(server, ask(server, ("die.wav",)).json())
    assert (died["state"], died["error"]["code"]) == ("failed", "worker_died")
    assert over(server, ask(server).json())["state"] == "done", "the next one goes on"


def test_a_cloning_that_does_not_listen_is_killed(server):
    job = ask(server, ("deaf.wav",)).json()
    eventually(lambda: look(server, job)["progress"]["stage"] == "learning")
    assert server.http.delete(f"/v1/voices/jobs/{job['id']}", headers=ADMIN).json()["state"] == "cancelled"


def test_it_is_followed_by_events(server):
    job = ask(server, ("wait.wav",)).json()
    seen = []
    with server.http.stream("GET", f"/v1/voices/jobs/{job['id']}/events", headers=ADMIN) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        for line in stream.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))
                if seen[-1]["progress"]["stage"] == "learning" and seen[-1]["state"] == "running":
                    server.http.delete(f"/v1/voices/jobs/{job['id']}", headers=ADMIN)
    assert seen[-1]["state"] == "cancelled"
    shares = [each["progress"]["share"] for each in seen]
    assert shares == sorted(shares)
    assert seen[-2]["progress"]["held_out"] == 0.9


def test_recordings_of_a_server_that_was_killed_go_away(tmp_path, monkeypatch):
    """The next one removes them, and nobody else's."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    held, fresh = UploadFolder(), tmp_path / f"{FOLDER_PREFIX}fresh"
    fresh.mkdir()
    dead, outside = tmp_path / f"{FOLDER_PREFIX}dead", tmp_path / "outside"
    for folder in (dead, outside):
        folder.mkdir()
        (folder / "1-a.wav").write_bytes(tone())
    (tmp_path / f"{FOLDER_PREFIX}link").symlink_to(outside)
    (tmp_path / f"{FOLDER_PREFIX}file").touch()
    for path in (held.path, dead, outside):
        os.utime(path, (1, 1))
    assert remove_stale_folders() == [dead]
    assert not dead.exists()
    assert held.path.exists()
    assert fresh.exists()
    assert (outside / "1-a.wav").exists()
    held.remove()
    held.remove()
    assert not held.path.exists()


def test_an_unknown_cloning(server):
    answer = server.http.get("/v1/voices/jobs/clone_0", headers=ADMIN)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_job"


def test_a_rename_that_is_none(server):
    for body in (b"", b"{}", b'{"name": 1}', b'{"name": "a", "more": 1}', b'{"name": "A B"}', b"x" * (2 << 20)):
        answer = server.http.patch("/v1/voices/ada", content=body, headers=ADMIN)
        assert answer.status_code == 400, body[:40]


def test_an_upload_that_is_cut_off_leaves_nothing(server):
    cut = tone(2)[:-9_000]
    body = (
        b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\nada\r\n'
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="../../a.wav"\r\n\r\n' + cut
    )
    answer = server.http.post(
        "/v1/voices", content=body, headers={**ADMIN, "content-type": "multipart/form-data; boundary=x"}
    )
    assert answer.status_code == 400
    assert "closing boundary" in answer.json()["error"]["message"]


async def test_going_down_cancels_what_goes_on_and_what_waits(tmp_path):
    from asr_serve.voices.cloned_voice import validated_consent
    from asr_serve.voices.cloning_messages import CloneRequest

    clonings = cloning_queue.CloningQueue(1, (WORKER,))

    def order(name: str) -> CloneRequest:
        return CloneRequest(
            name=name,
            audio=["wait.wav"],
            consent=validated_consent(EXAMPLE, "t"),
            model="m",
            voices_dir=str(tmp_path / "v"),
        )

    jobs = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        jobs.append(clonings.enqueue(order(name), folder, 1))
    async with asyncio.timeout(60):
        async for _ in jobs[0].updates():
            if jobs[0].progress.stage == "learning":
                break
        clonings.drain()
        await clonings.close()
    assert [job.state for job in jobs] == ["cancelled", "cancelled"]
    assert not [job.folder for job in jobs if job.folder.exists()]
    with pytest.raises(EngineClosed):
        clonings.enqueue(order("three"), tmp_path, 1)
    assert VoiceStore(tmp_path / "v").names() == []


async def test_the_queue_has_an_end(tmp_path, monkeypatch):
    from asr_serve.voices.cloned_voice import validated_consent
    from asr_serve.voices.cloning_messages import CloneRequest

    monkeypatch.setattr(cloning_queue, "MAX_QUEUED", 1)
    clonings = cloning_queue.CloningQueue(1, (WORKER,))
    made = [
        CloneRequest(
            name=name, audio=["wait"], consent=validated_consent(EXAMPLE, "t"), model="m", voices_dir=str(tmp_path)
        )
        for name in ("one", "two", "three")
    ]
    first = clonings.enqueue(made[0], tmp_path / "one", 1)
    async with asyncio.timeout(60):
        async for _ in first.updates():
            if first.state == "running":
                break
    clonings.enqueue(made[1], tmp_path / "two", 1)
    with pytest.raises(AtCapacity):
        clonings.enqueue(made[2], tmp_path / "three", 1)
    await clonings.close()
