"""One client of two engine processes: answers of one on a thread, also when a process dies, hangs or is drained."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from engine_clients import NEMO, NEMO_MODEL, RING, WAIT_S, backend_of, engine_pid, start_engine, wait_until
from safetensors.torch import load_file, save_file
from tiny_moonshine import clip, save

from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.cluster.autoscaling import MAX_REPLICAS
from asr_serve.config import EngineConfig
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.cache.digest import audio_digest, keyed
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process.engine_process import RingSize
from asr_serve.engine.process.in_flight import InFlight, InFlightSession, InFlightStream, InFlightUtterance, queue_state
from asr_serve.engine.process.messages import EngineAddress, EnginePing, EnginePong, ListenSpec, OpenVadSession
from asr_serve.engine.process.server_handshake import MAX_SERVERS, greet_server
from asr_serve.engine.replicas.backend import ReplicatedBackend, merge_metrics, replicated_backend
from asr_serve.engine.replicas.remote_engine import RemoteEngine
from asr_serve.engine.request import RecognitionRequest, StreamChunk, VadAnswer, VadChunk
from asr_serve.errors import AtCapacity, EngineClosed, PeerGone, PeerRefused
from asr_serve.metrics import ServerMetrics, render_exposition
from asr_serve.models.checkpoints.store import resolve
from asr_serve.models.registry import asr_card
from asr_serve.server.engine_registry import EngineParts, ModelEngine
from asr_serve.text.tokenizers import TOKENIZER_FILES

MODEL = "moonshine-tiny-en"
ONCE = SearchOptions(temperatures=(0.0,))
CLIPS = [clip(seed, 16_000 + 7_919 * seed) for seed in range(12)]
KEY = b"a key of this test alone"


class Settings(NamedTuple):
    key: bytes = KEY
    digest_key: bytes = KEY
    ring: RingSize = RING
    silent_s: float = 60.0


class Processes:
    """Engine processes of their own owners, as a directory of replicas."""

    def __init__(self, owners: list[EngineClient], same_machine: bool) -> None:
        self.owners, self.same_machine = owners, same_machine
        self.backend: ReplicatedBackend

    def start(self, backend: ReplicatedBackend) -> None:
        self.backend = backend
        for number, owner in enumerate(self.owners):
            backend.connect(f"replica {number}", address_of(owner), same_machine=self.same_machine)

    def close(self) -> None:
        pass


def address_of(owner: EngineClient) -> EngineAddress:
    address = backend_of(owner).ready.address
    assert address is not None
    return address


def config_of(model: str) -> EngineConfig:
    return EngineConfig(max_decode_rows=8, kv_bytes=1 << (24 if model == NEMO_MODEL else 20), max_sessions=6)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[EngineClient]]]:
    """Owners of engine processes; those that no test kills are shared."""
    shared: dict[str, list[EngineClient]] = {}
    own: list[EngineClient] = []
    folders = {MODEL: save(tmp_path_factory.mktemp("tiny")), NEMO_MODEL: NEMO}

    def start(
        model: str = MODEL, fresh: bool = False, new_live_callers: tuple[int | None, ...] = (None, None)
    ) -> list[EngineClient]:
        if model in shared and not fresh:
            return shared[model]
        listen = ListenSpec(str(tmp_path_factory.mktemp("sockets")), "127.0.0.1", KEY)
        with ThreadPoolExecutor() as pool:
            owners = [
                pool.submit(
                    start_engine,
                    model,
                    folders[model],
                    msgspec.structs.replace(config_of(model), new_live_callers=callers),
                    process=True,
                    turn_model="none",
                    servers=listen,
                    digest_key=KEY,
                )
                for callers in new_live_callers
            ]
        (own if fresh else shared.setdefault(model, [])).extend(owner.result() for owner in owners)
        return [owner.result() for owner in owners]

    start.folders = folders  # type: ignore[attr-defined]
    yield start
    for owner in [*own, *(each for owners in shared.values() for each in owners)]:
        owner.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., tuple[EngineClient, Processes]]]:
    """A client of replicas."""
    clients: list[EngineClient] = []

    def make(
        owners: list[EngineClient], same_machine: bool = True, new_live_callers: int | None = 32, **settings: Any
    ) -> tuple[EngineClient, Processes]:
        directory = Processes(owners, same_machine)
        config = msgspec.structs.replace(config_of(MODEL), new_live_callers=new_live_callers)
        client = EngineClient(config, replicated_backend(directory, Settings(**settings)))
        clients.append(client)
        directory.backend.watch_room(client.set_room)
        wait_until(lambda: len(directory.backend.loads) == len(owners))
        return client, directory

    yield make
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def expected(launch: Any) -> list[Any]:
    """Tokens of all clips, from an engine on a thread."""
    client = start_engine(MODEL, launch.folders[MODEL], config_of(MODEL))
    tokens = [client.submit(pcm, ONCE).future.result(WAIT_S).tokens for pcm in CLIPS]
    client.close()
    assert len(set(tokens)) > len(CLIPS) // 2, "answers must tell the clips apart"
    return tokens


def nothing_left(owners: list[EngineClient]) -> bool:
    found = [owner.describe() for owner in owners]
    # An engine that does not answer in time has said nothing yet.
    return not any(each.get("pages_used", each.get("slots_used", 1)) or each["sessions_used"] for each in found)


@pytest.mark.parametrize("same_machine", [True, False], ids=["ring", "tcp"])
def test_replicas_share_the_work_and_answer_as_one_engine(launch, connect, expected, same_machine):
    owners = launch()
    client, directory = connect(owners, same_machine)
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
    loads = directory.backend.loads
    assert [ticket.future.result(WAIT_S).tokens for ticket in tickets] == expected
    assert all(load.queued_samples for load in loads.values()), "each replica has some"
    assert all(load.queued_samples == 0 for load in directory.backend.loads.values())
    assert client.describe()["requests"] == 0


def test_two_servers_may_use_the_same_numbers_and_one_that_goes_leaves_nothing(launch, connect, expected):
    owners = launch()
    first, _ = connect(owners[:1])
    second, _ = connect(owners[:1])
    session = second.open_vad_session()
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS for client in (first, second)]
    assert [ticket.future.result(WAIT_S).tokens for ticket in tickets] == [t for t in expected for _ in range(2)]
    session.submit_windows(clip(5, 8 * WINDOW_SAMPLES)).result(WAIT_S)
    assert not nothing_left(owners[:1])
    second.close()  # with its session
    wait_until(lambda: nothing_left(owners[:1]))


@pytest.mark.slow
@pytest.mark.parametrize("same_machine", [True, False], ids=["ring", "tcp"])
def test_a_killed_replica_loses_nothing_and_comes_back(launch, connect, expected, same_machine):
    owners = launch(fresh=True)
    client, directory = connect(owners, same_machine)
    session = client.open_vad_session()
    pieces = np.split(clip(5, 64 * WINDOW_SAMPLES), 8)
    answers = [session.submit_windows(piece).result(WAIT_S) for piece in pieces[:3]]
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
    holder = max(directory.backend.loads, key=lambda name: directory.backend.loads[name].sessions)
    victim = owners[int(holder[-1])]
    os.kill(engine_pid(victim), signal.SIGKILL)
    answers += [session.submit_windows(piece).result(WAIT_S) for piece in pieces[3:]]
    assert [ticket.future.result(WAIT_S).tokens for ticket in tickets] == expected
    reference = owners[1 - int(holder[-1])].open_vad_session()
    assert np.array_equal(
        np.concatenate(answers), np.concatenate([reference.submit_windows(piece).result(WAIT_S) for piece in pieces])
    )
    reference.close()
    session.close()
    wait_until(lambda: victim.state == "ready" and backend_of(victim).restarts == 1)
    directory.backend.connect(holder, backend_of(victim).address, same_machine=same_machine)
    wait_until(lambda: len(directory.backend.loads) == 2)
    assert directory.backend.restarts == 1


@pytest.mark.slow
def test_without_a_replica_work_waits_for_the_next(launch, connect, expected):
    owners = launch(fresh=True)[:1]
    client, directory = connect(owners)
    os.kill(engine_pid(owners[0]), signal.SIGKILL)
    wait_until(lambda: client.state == "restarting")
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS[:4]]
    wait_until(lambda: backend_of(owners[0]).restarts == 1)
    directory.backend.connect("replica 0", backend_of(owners[0]).address, same_machine=True)
    assert [ticket.future.result(WAIT_S).tokens for ticket in tickets] == expected[:4]


@pytest.mark.slow
def test_a_paused_replica_counts_as_dead(launch, connect, expected):
    owners = launch(fresh=True)
    client, _ = connect(owners, silent_s=1.0)
    os.kill(engine_pid(owners[0]), signal.SIGSTOP)
    try:
        tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
        assert [ticket.future.result(WAIT_S).tokens for ticket in tickets] == expected
    finally:
        os.kill(engine_pid(owners[0]), signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("same_machine", [True, False], ids=["ring", "tcp"])
def test_a_drained_replica_hands_its_streams_over_in_the_middle_of_a_word(launch, connect, same_machine):
    owners = launch(NEMO_MODEL)
    client, directory = connect(owners, same_machine)
    pcm = clip(3, 40_960)
    pieces = np.split(pcm, 8)

    def tokens(*, drain: bool) -> tuple[list[Any], list[Any]]:
        streams = [client.open_stream(live=True, samples=len(pcm)) for _ in range(4)]
        found: list[list[Any]] = [[] for _ in streams]
        thread = threading.Thread(target=directory.backend.drain, args=("replica 0", WAIT_S))
        for at, piece in enumerate(pieces):
            if at == 4 and drain:
                thread.start()
            for stream, results in zip(streams, found, strict=True):
                results.append(stream.submit_audio(piece, last=at == len(pieces) - 1))
        if drain:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        results = [[future.result(WAIT_S) for future in each] for each in found]
        return [[token.id for each in one for token in each.fixed_tokens] for one in results], found

    before, _ = tokens(drain=False)
    after, _ = tokens(drain=True)
    assert after == before
    assert len(before[0]) > 0
    assert list(directory.backend.loads) == ["replica 1"]
    assert directory.backend.moved["stream", "state"] >= 1
    wait_until(lambda: nothing_left(owners))


@pytest.mark.slow
def test_the_last_replica_goes_on_until_another_is_there(launch, connect, expected):
    owners = launch()
    client, directory = connect(owners[:1])
    session = client.open_vad_session()
    draining = threading.Thread(target=directory.backend.drain, args=("replica 0", WAIT_S))
    draining.start()
    wait_until(lambda: client.state == "restarting")
    assert [client.submit(pcm, ONCE).future.result(WAIT_S).tokens for pcm in CLIPS[:3]] == expected[:3]
    directory.backend.connect("replica 1", address_of(owners[1]), same_machine=True)
    draining.join(WAIT_S)
    assert list(directory.backend.loads) == ["replica 1"]
    assert directory.backend.loads["replica 1"].sessions == 1
    assert [client.submit(pcm, ONCE).future.result(WAIT_S).tokens for pcm in CLIPS[3:6]] == expected[3:6]
    session.close()


def test_repeated_audio_goes_to_who_has_it(launch, connect, expected):
    owners = launch()
    client, directory = connect(owners)
    backend = directory.backend
    pcm = clip(99, 24_000)
    digest = audio_digest(pcm, mac=keyed(KEY))
    first = client.submit(pcm, ONCE).future.result(WAIT_S)
    wait_until(lambda: len(backend._audio.holders(digest)) == 1)
    again = [client.submit(pcm, ONCE).future.result(WAIT_S) for _ in range(6)]
    assert {answer.tokens for answer in again} == {first.tokens}
    assert all(answer.reused for answer in again), "each went to the replica that had it"
    assert backend.audio_hits >= 6
    assert len(backend._audio.holders(digest)) == 1
    for number in range(40):  # more than the caches hold
        client.submit(clip(200 + number, 64_000), ONCE).future.result(WAIT_S)
    wait_until(lambda: not backend._audio.holders(digest))


def test_without_any_replica_for_long_requests_are_refused_until_one_is_there(launch, connect, expected, monkeypatch):
    monkeypatch.setattr("asr_serve.engine.replicas.backend.NO_REPLICA_S", 0.5)
    owners = launch()
    client, directory = connect(owners[:1])
    directory.backend.drain("replica 0", 0.0)
    waiting = client.submit(CLIPS[0], ONCE).future
    with pytest.raises(EngineClosed, match="no replica"):
        waiting.result(WAIT_S)
    assert client.state == "failed"
    with pytest.raises(EngineClosed, match="no replica"):
        client.submit(CLIPS[0], ONCE)
    directory.backend.connect("replica 0", address_of(owners[0]), same_machine=True)
    wait_until(lambda: client.state == "ready")
    assert client.submit(CLIPS[0], ONCE).future.result(WAIT_S).tokens == expected[0]


def other_folder(folder: Path, into: Path, *, tokenizer: bool = False) -> Path:
    """A copy with other weights, or only with another tokenizer."""
    shutil.copytree(folder, into)
    if tokenizer:
        path = next(path for name in TOKENIZER_FILES if (path := into / name).is_file())
        path.write_bytes(path.read_bytes() + b"\n")
        return into
    weights = load_file(into / "model.safetensors")
    save_file({name: tensor * 1.1 for name, tensor in weights.items()}, into / "model.safetensors")
    return into


@pytest.fixture
def start_other(tmp_path: Path) -> Iterator[Callable[[str, Path], EngineClient]]:
    """Starts an engine process for a folder of its own."""
    owners: list[EngineClient] = []

    def start(model: str, folder: Path, sessions: int | None = None) -> EngineClient:
        listen = ListenSpec(str(tmp_path), None, KEY, sessions)
        owners.append(
            start_engine(
                model, folder, config_of(model), process=True, turn_model="none", servers=listen, digest_key=KEY
            )
        )
        return owners[-1]

    yield start
    for owner in owners:
        owner.close()


def test_a_replica_with_another_tokenizer_takes_no_work_and_the_server_is_to_be_replaced(
    launch, connect, expected, start_other, tmp_path
):
    other = start_other(MODEL, other_folder(launch.folders[MODEL], tmp_path / "other", tokenizer=True))
    client, directory = connect(launch()[:1])
    backend = directory.backend
    backend.connect("other", address_of(other), same_machine=True)
    wait_until(lambda: backend._replicas["other"].differs)
    assert not backend.outdated, "the first replica takes work"
    assert list(backend.loads) == ["replica 0"]
    draining = threading.Thread(target=backend.drain, args=("replica 0", 2.0))
    draining.start()
    wait_until(lambda: backend.outdated)
    assert client.submit(CLIPS[0], ONCE).future.result(WAIT_S).tokens == expected[0], "the first one finishes"
    draining.join(WAIT_S)
    assert not backend.loads
    backend.drain("other", 0.0)
    assert not backend.outdated


@pytest.mark.slow
def test_other_weights_take_new_work_while_streams_end_where_they_began(launch, connect, start_other, tmp_path):
    """A stream whose replica does not wait for its end is replayed: what was sent stays, and nothing fails."""
    converted = resolve(asr_card(NEMO_MODEL), launch.folders[NEMO_MODEL])
    other = start_other(NEMO_MODEL, other_folder(converted, tmp_path / "other"))
    client, directory = connect(launch(NEMO_MODEL)[:1])
    backend = directory.backend
    pcm = clip(3, 40_960)
    first, second = pcm[:20_480], pcm[20_480:]

    def tokens(*answers: Future[Any]) -> list[int]:
        return [token.id for answer in answers for token in answer.result(WAIT_S).fixed_tokens]

    def whole() -> list[int]:
        stream = client.open_stream(live=True, samples=len(pcm))
        return tokens(stream.submit_audio(first), stream.submit_audio(second, last=True))

    before = whole()
    streams = [client.open_stream(live=True, samples=len(pcm)) for _ in range(2)]
    begun = [stream.submit_audio(first) for stream in streams]
    sent = [tokens(each) for each in begun]
    backend.connect("other", address_of(other), same_machine=True)
    wait_until(lambda: "other" in backend.loads)
    assert not backend.outdated
    draining = threading.Thread(target=backend.drain, args=("replica 0", 5.0))
    draining.start()
    wait_until(lambda: backend.loads["replica 0"].sessions == 2 and backend._replicas["replica 0"].draining)
    after = whole()
    assert after != before, "new streams have the other weights"
    assert sent[0] + tokens(streams[0].submit_audio(second, last=True)) == before, "it ended where it began"
    draining.join(WAIT_S)
    assert list(backend.loads) == ["other"]
    assert (backend.moved["stream", "state"], backend.moved["stream", "replay"]) == (0, 1)
    assert streams[1].submit_audio(second, last=True).result(WAIT_S) is not None
    wait_until(lambda: nothing_left([other]))


def test_a_lost_connection_is_no_death_of_its_engine(launch, connect, expected):
    client, directory = connect(launch()[:1])
    backend = directory.backend
    session = client.open_vad_session()
    for cut in range(5):
        tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
        answer = session.submit_windows(clip(cut, 8 * WINDOW_SAMPLES))
        process = backend._replicas["replica 0"].in_flight.process
        process.kill()
        answer.result(WAIT_S)
        assert [ticket.future.result(WAIT_S).tokens for ticket in tickets] == expected
    work = InFlightSession(True)
    work.append_chunk(VadChunk(0, clip(0, WINDOW_SAMPLES), VadAnswer()))
    in_flight = InFlight()
    in_flight.open(0, work)
    suspects, _ = in_flight.record_loss("was lost")
    assert (suspects, work.deaths) == ([work], 0)
    session.close()


@pytest.mark.parametrize("first", [b"\xc1", None], ids=["garbage", "silence"])
def test_a_replica_that_says_nothing_of_use_is_tried_again(launch, connect, expected, tmp_path, first):
    client, directory = connect(launch()[:1], silent_s=0.5)
    path = str(tmp_path / "it.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(WAIT_S)
        directory.backend.connect("liar", EngineAddress(path, None), same_machine=True)
        for _ in range(3):
            line, _ = listener.accept()
            for descriptor in greet_server(line, KEY) or ():
                os.close(descriptor)
            pipe = Connection(line.detach())
            if first is not None:
                pipe.send_bytes(first)
            assert pipe.poll(WAIT_S)
            with pytest.raises((EOFError, OSError)):
                pipe.recv_bytes()
            pipe.close()
    assert list(directory.backend.loads) == ["replica 0"]
    assert client.submit(CLIPS[0], ONCE).future.result(WAIT_S).tokens == expected[0]


def answer_of(session: Any) -> Any:
    return session.submit_windows(clip(5, 2 * WINDOW_SAMPLES)).result(WAIT_S)


def test_sessions_fill_all_replicas_and_one_more_is_refused(launch, connect):
    owners = launch()
    wait_until(lambda: nothing_left(owners))
    client, directory = connect(owners)
    assert client.max_sessions == 12
    sessions = [client.open_vad_session() for _ in range(12)]
    first = answer_of(sessions[0])
    assert all(np.array_equal(answer_of(session), first) for session in sessions[1:])
    assert [load.sessions for load in directory.backend.loads.values()] == [6, 6]
    wait_until(lambda: client.max_sessions == 12)
    with pytest.raises(AtCapacity, match="12 sessions are open"):
        client.open_vad_session()
    for session in sessions:
        session.close()


def test_a_replica_that_others_fill_sends_sessions_on_and_is_at_capacity_last(launch, connect):
    owners = launch()
    wait_until(lambda: nothing_left(owners))
    (first, _), (second, directory) = connect(owners[:1]), connect(owners)
    held = [first.open_vad_session() for _ in range(6)]
    expected = answer_of(held[0])
    mine = [second.open_vad_session() for _ in range(6)]  # before it can know
    assert all(np.array_equal(answer_of(session), expected) for session in mine)
    assert [load.sessions for load in directory.backend.loads.values()] == [0, 6]

    def one_more() -> None:
        mine.append(second.open_vad_session())
        answer_of(mine[-1])

    for _ in range(3):
        with pytest.raises(AtCapacity):
            one_more()
    for session in [*held, *mine]:
        session.close()
    wait_until(lambda: second.max_sessions == 12)
    wait_until(lambda: nothing_left(owners))


def test_sessions_and_streams_of_other_servers_are_bounded_and_the_owner_keeps_its_own(launch, connect, start_other):
    owner = start_other(NEMO_MODEL, launch.folders[NEMO_MODEL], 1)
    (first, _), (second, _) = connect([owner]), connect([owner])
    session = first.open_vad_session()
    answer_of(session)
    beyond = second.open_vad_session()  # before it can know
    with pytest.raises(AtCapacity, match="1 sessions of other servers"):
        answer_of(beyond)
    sound = clip(7, 16_000)
    streams = [client.open_stream(live=True) for client in (first, second)]
    expected = [stream.submit_audio(sound, last=False).result(WAIT_S) for stream in streams]
    refused = first.open_stream(live=True)
    with pytest.raises(AtCapacity, match="2 streams of other servers"):
        refused.submit_audio(sound, last=True).result(WAIT_S)
    own = [owner.open_vad_session() for _ in range(6)]
    for each in own:
        answer_of(each)
    own_stream = owner.open_stream(live=True)
    assert own_stream.submit_audio(sound, last=False).result(WAIT_S) == expected[0]
    streams[0].submit_audio(sound, last=True).result(WAIT_S)  # one that ends frees its place
    again = second.open_stream(live=True)
    assert again.submit_audio(sound, last=False).result(WAIT_S) == expected[1]
    for closed in (session, beyond, refused):
        closed.close()

    def is_free() -> bool:
        try:
            with contextlib.closing(second.open_vad_session()) as freed:
                answer_of(freed)
        except AtCapacity:
            return False
        return True

    wait_until(is_free)
    for each in (*own, own_stream, streams[1], again):
        each.close()


def test_several_servers_share_the_slow_start_of_live_callers(launch, connect):
    """What one engine takes of new callers is for all its servers together; what two engines take, for both."""
    owners = launch()

    def admitted(client: EngineClient) -> int:
        opened = []

        def open_all() -> None:
            while True:
                opened.append(client.open_vad_session(live=True))

        with pytest.raises(AtCapacity, match="just connected"):
            open_all()
        for session in opened:
            session.close()
        return len(opened)

    first, one = connect(owners[:1], new_live_callers=4)
    wait_until(lambda: one.backend.new_live_callers == 4)
    assert admitted(first) == 4
    second, both = connect(owners, new_live_callers=4)
    wait_until(lambda: one.backend.new_live_callers == 2 and both.backend.new_live_callers == 6)
    assert (admitted(first), admitted(second)) == (2, 6)
    second.close()
    wait_until(lambda: one.backend.new_live_callers == 4)
    assert admitted(first) == 4


def test_each_replica_reports_how_many_live_callers_may_be_new(launch, connect):
    owners = launch(fresh=True, new_live_callers=(3, 5))
    client, directory = connect(owners, new_live_callers=None)
    wait_until(lambda: client.describe()["new_live_callers"] == 8)
    directory.backend.drain("replica 0", 0.0)
    wait_until(lambda: client.describe()["new_live_callers"] == 5)


@pytest.mark.parametrize("same_machine", [True, False], ids=["ring", "tcp"])
def test_a_silent_server_is_disconnected_and_leaves_nothing(launch, same_machine):
    owners = launch()
    wait_until(lambda: nothing_left(owners))
    engine = RemoteEngine.connect(address_of(owners[0]), KEY, RING, same_machine=same_machine, name="it")
    try:
        assert engine.wait_ready().free_sessions == 6
        engine.send(OpenVadSession(1, False, None))
        engine.send(EnginePing(1.0))
        pongs = []
        while (message := engine.receive()) is not None:
            pongs.append(message)
        assert EnginePong in map(type, pongs), "it was connected"
    finally:
        engine.close()
    wait_until(lambda: nothing_left(owners))


def test_an_engine_reports_the_queues_of_its_servers(launch, connect):
    owners = launch()
    backend = backend_of(owners[0])
    assert (backend.report().load.backlog_s, backend.report().load.ingress_queue) == (None, None)
    servers = [
        RemoteEngine.connect(address_of(owners[0]), KEY, RING, same_machine=True, name=f"server {number}")
        for number in range(2)
    ]
    try:
        for server, samples, fill in zip(servers, (16_000, 40_000), (0.25, 0.75), strict=True):
            server.wait_ready()
            server.send(EnginePing(60.0, samples, fill))
        wait_until(lambda: backend.report().load.backlog_s == 3.5)
        assert backend.report().load.ingress_queue == 0.75, "of the fullest one"
    finally:
        for server in servers:
            server.close()
    wait_until(lambda: backend.report().load.backlog_s is None)
    client, _ = connect(owners, silent_s=2.5)
    wait_until(lambda: backend.report().load.backlog_s == 0.0)
    load = backend.report().load
    assert (load.ingress_queue, load.sessions, load.accelerator, load.collectives) == (0.0, 0.0, None, None)
    wait_until(lambda: backend.report().load.occupancy is not None)
    for name in (b"accelerator_utilization_ratio", b"collective_seconds_total"):
        assert b"asr_serve_%s{" % name not in backend.report().metrics, "what there is not has no sample"
    session = client.open_vad_session()
    answer_of(session)
    assert max(backend_of(owner).report().load.sessions for owner in owners) == pytest.approx(1 / 6)
    session.close()


def test_a_replica_full_of_another_servers_work_gets_none(launch, connect, expected):
    owners = launch()
    client, directory = connect(owners, silent_s=1.0)
    backend = directory.backend
    pcm = clip(98, 24_000)
    digest = audio_digest(pcm, mac=keyed(KEY))
    client.submit(pcm, ONCE).future.result(WAIT_S)
    wait_until(lambda: len(backend._audio.holders(digest)) == 1)
    [full] = backend._audio.holders(digest)
    [idle] = set(backend.loads) - {full}
    # Another server reports more for the one that has the audio than all that follows is.
    other = RemoteEngine.connect(address_of(owners[int(full[-1])]), KEY, RING, same_machine=True, name="other")
    try:
        other.wait_ready()
        other.send(EnginePing(600.0, 1 << 30, 0.0, 9))
        wait_until(lambda: backend.loads[full].others_samples == 1 << 30)
        assert backend.loads[full].others_sessions == 9
        assert backend.loads[idle][2:] == (0, 0), "its own work is not that of others"
        hits = backend.audio_hits
        tickets = [client.submit(pcm, ONCE) for pcm in (*CLIPS, pcm)]
        session = client.open_vad_session()
        loads = backend.loads
        assert [ticket.future.result(WAIT_S).tokens for ticket in tickets[:-1]] == expected
        assert (loads[full].queued_samples, loads[full].sessions) == (0, 0)
        assert loads[idle].queued_samples > 0
        assert loads[idle].sessions == 1
        assert backend.audio_hits == hits, "computed again, since the queue of the one that has it is longer"
        session.close()
    finally:
        other.close()
    wait_until(lambda: backend.loads[full][2:] == (0, 0))


def test_a_server_is_connected_to_as_many_replicas_as_a_model_may_have(launch, expected):
    """All of them are connections to one engine, which takes no more."""
    address = address_of(launch()[0])
    names = [f"replica {number}" for number in range(MAX_REPLICAS)]
    assert MAX_REPLICAS == MAX_SERVERS

    class Names:
        def start(self, backend: ReplicatedBackend) -> None:
            for name in names:
                backend.connect(name, address, same_machine=False)

        def close(self) -> None:
            pass

    client = EngineClient(config_of(MODEL), replicated_backend(Names(), Settings()))
    backend = client.backend
    assert isinstance(backend, ReplicatedBackend)
    try:
        wait_until(lambda: list(backend.loads) == names, lambda: str(len(backend.loads)))
        refused = RemoteEngine.connect(address, KEY, RING, same_machine=False, name="one more")
        with contextlib.closing(refused), pytest.raises(PeerGone):
            refused.wait_ready()
        assert [client.submit(pcm, ONCE).future.result(WAIT_S).tokens for pcm in CLIPS] == expected
        backend.drain(names[0], WAIT_S)
        assert list(backend.loads) == names[1:]
    finally:
        client.close()
    wait_until(lambda: backend_of(launch()[0]).report().load.backlog_s is None)


def test_work_that_no_engine_has_begun_fills_the_queue():
    backlog = InFlight()
    for number, pcm in enumerate(CLIPS[:4]):
        backlog.submit(InFlightUtterance(RecognitionRequest(number, pcm, len(pcm), ONCE, "bulk", Future())))
    backlog.requests[0].started = True
    backlog.open(9, stream := InFlightStream(True, None, False))
    stream.append_chunk(StreamChunk(9, CLIPS[5], False, Future()))
    state = queue_state([backlog, InFlight()])
    waiting_samples = sum(map(len, CLIPS[1:4]))
    assert state == (3, waiting_samples, sum(map(len, CLIPS[:4])) + len(CLIPS[5]))
    assert state.fill(4, 1 << 30) == 0.75
    assert state.fill(4_000, 2 * waiting_samples) == 0.5, "a queue is as full as its fuller measure"
    assert state.fill(1, 1) == 1.0


def test_the_fill_of_the_queue_is_exported_as_its_fuller_measure(launch):
    directory = Processes(launch()[:1], True)
    config = msgspec.structs.replace(config_of(MODEL), max_requests=100, max_audio_s=100.0)
    client = EngineClient(config, replicated_backend(directory, Settings()))
    engine, metrics = ModelEngine(EngineParts(asr_card(MODEL), client, None, {})), ServerMetrics("1")

    def exported() -> dict[str, float]:
        engine.observe(metrics)
        lines = render_exposition(metrics, []).decode().splitlines()
        names = ("requests", "capacity_requests", "fill_ratio")
        found = {
            name: [line for line in lines if line.startswith(f"asr_serve_ingress_queue_{name}{{")] for name in names
        }
        return {name: float(line.split()[-1]) for name, [line] in found.items()}

    try:
        assert exported() == {"requests": 0, "capacity_requests": 100, "fill_ratio": 0}
        directory.backend.drain("replica 0", 0.0)
        tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]  # no engine begins them
        fill = sum(map(len, CLIPS)) / 1_600_000
        assert fill > len(CLIPS) / 100
        assert exported() == {"requests": len(CLIPS), "capacity_requests": 100, "fill_ratio": fill}
        for ticket in tickets:
            client.cancel(ticket)
    finally:
        client.close()


def test_who_does_not_know_the_key_is_turned_away(launch):
    address = address_of(launch()[0])
    for same_machine in (True, False):
        with pytest.raises(PeerRefused, match="does not know the key"):
            RemoteEngine.connect(address, b"another key", RING, same_machine=same_machine, name="it")


def test_nobody_there_is_an_error_that_says_so(tmp_path: Path):
    with pytest.raises(PeerGone, match="cannot be reached"):
        RemoteEngine.connect(EngineAddress(str(tmp_path / "no"), None), KEY, RING, same_machine=True, name="it")


def test_merged_metrics_have_each_family_once():
    text = b'# HELP a_total A.\n# TYPE a_total counter\na_total{model="m"} 1.0\n# HELP b B.\n# TYPE b gauge\nb 2.0\n'
    assert merge_metrics({"x": text, 'y"': text}).decode().splitlines() == [
        "# HELP a_total A.",
        "# TYPE a_total counter",
        'a_total{replica="x",model="m"} 1.0',
        'a_total{replica="y\\"",model="m"} 1.0',
        "# HELP b B.",
        "# TYPE b gauge",
        'b{replica="x"} 2.0',
        'b{replica="y\\""} 2.0',
    ]
