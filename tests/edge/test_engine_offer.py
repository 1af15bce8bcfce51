"""Offer of an engine in a folder, and who may take it: without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asr_serve import __version__
from asr_serve.config import EngineConfig
from asr_serve.edge import local_engine
from asr_serve.edge.local_engine import LocalEngine, _OfferedEngine
from asr_serve.engine.process import local_offer
from asr_serve.engine.process.engine_process import RingSize
from asr_serve.engine.process.local_offer import (
    OFFER_FILE,
    EngineOffer,
    lock_offer_folder,
    read_offer,
    remove_offer,
    write_offer,
)
from asr_serve.errors import OptionError, PeerRefused, Unreachable
from asr_serve.server.engine_offer import EdgeOffer

OFFER = EngineOffer(__version__, "/nowhere.sock", b"key", RingSize(8, 1 << 16), EngineConfig())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "offer"


@pytest.fixture
def offered(folder: Path) -> Iterator[str]:
    with lock_offer_folder(str(folder), "edge_folder"):
        write_offer(str(folder), OFFER)
        yield str(folder)


def test_an_offer_lasts_as_long_as_its_server_has_the_lock(folder: Path) -> None:
    assert read_offer(str(folder)) is None
    with lock_offer_folder(str(folder), "edge_folder"):
        write_offer(str(folder), OFFER)
        assert read_offer(str(folder)) == OFFER
    assert (folder / OFFER_FILE).exists()  # as of a server that was killed
    assert read_offer(str(folder)) is None
    (folder / "1.sock").touch()  # a process of that number lives
    with lock_offer_folder(str(folder), "edge_folder"):
        assert {path.name for path in folder.iterdir()} == {"engine.lock"}
        write_offer(str(folder), OFFER)
        remove_offer(str(folder))
        assert read_offer(str(folder)) is None


def test_a_second_server_is_refused_the_folder_and_overwrites_nothing(
    offered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_offer, "LOCK_WAIT_S", 0.0)
    with pytest.raises(OptionError, match="another server") as refused:
        EdgeOffer(offered, 1)
    assert refused.value.param == "edge_folder"
    assert read_offer(offered) == OFFER


def test_readers_of_an_offer_keep_no_server_out(folder: Path) -> None:
    for _ in range(3):
        EdgeOffer(str(folder), 1).close()
        assert read_offer(str(folder)) is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_a_folder_that_others_may_use_is_refused_by_the_reader_too(offered: str, mode: int) -> None:
    os.chmod(offered, mode)
    with pytest.raises(PeerRefused, match="others"):
        read_offer(offered)


def test_links_and_files_of_others_are_refused_on_both_sides(offered: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(offered)
    with pytest.raises(PeerRefused, match="link"):
        read_offer(str(link))
    with pytest.raises(OptionError, match="link"):
        lock_offer_folder(str(link), "edge_folder")
    file = Path(offered) / OFFER_FILE
    os.chmod(file, 0o666)
    with pytest.raises(PeerRefused, match="others"):
        read_offer(offered)
    os.chmod(file, 0o600)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PeerRefused, match="cannot be read"):
        read_offer(offered)


def test_a_folder_of_another_user_is_refused(offered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(PeerRefused, match=f"of the user {owner}"):
        read_offer(offered)


def _attempts(folder: str, count: int) -> list[str]:
    async def run() -> list[str]:
        engine, told = LocalEngine(folder), []
        for _ in range(count):
            try:
                await engine.wait_connected()
                engine.parts()
            except Unreachable as failure:
                told.append(failure.came)
        await engine.close()
        return told

    return asyncio.run(run())


def test_an_error_of_any_kind_ends_an_attempt_and_not_the_engine(offered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(local_engine, "replicated_backend", connect)
    monkeypatch.setattr(local_engine, "CONNECT_S", 30.0)  # the future is resolved long before
    told = _attempts(offered, 2)
    assert all("Too many open files" in each for each in told)
    assert len(told) == 2


def test_an_engine_that_never_answers_is_given_up(offered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_engine, "FIRST_MESSAGE_S", 0.3)
    monkeypatch.setattr(local_engine, "CONNECT_S", 60.0)
    (told,) = _attempts(offered, 1)
    assert "no replica came within 0.3 s" in told


class _Backend:
    """What a directory calls."""

    def __init__(self, engine: _OfferedEngine) -> None:
        self._engine, self.calls = engine, []

    def connect(self, _: str, address: Any, *, same_machine: bool) -> None:
        self.calls.append(address.unix_path)
        self._engine.close()

    def close(self) -> None:
        self.calls.append("closed")
        self._engine.close()


@pytest.mark.parametrize(
    ("change", "calls"),
    [
        ({"path": "/new.sock", "key": b"new"}, ["/new.sock"]),
        ({"release": "0.0.1"}, ["closed"]),
        ({"config": EngineConfig(max_sessions=3)}, ["closed"]),
    ],
)
def test_an_engine_of_another_release_or_other_settings_is_connected_anew(
    offered: str, change: dict[str, Any], calls: list[str]
) -> None:
    engine = _OfferedEngine(offered, OFFER)
    backend: Any = _Backend(engine)
    write_offer(offered, msgspec.structs.replace(OFFER, **change))
    with contextlib.closing(engine):
        engine._watch(backend)
    assert backend.calls == calls
