"""A real Ray on this machine: `asr-serve cluster up` with two replicas. Whatever is killed, no caller loses a word."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from children import MODULE_LIMIT_S, Child
from safetensors.torch import load_file, save_file

from asr_serve.models.checkpoints.store import resolve
from asr_serve.models.registry import asr_card
from asr_serve.text.tokenizers import load_tokenizer

pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

WAIT_S = 180.0
MODEL = "moonshine-tiny-en"
FILE = f"""
models:
  - {{model: {MODEL}, replicas: 2, cpus: 1}}
replica_silent_s: 5
serve: {{port: 0, turn_model: none, drain_s: 100, engine: {{prefix_bytes: 0}}}}
"""
MAIN = [sys.executable, "-c", "from asr_serve.api.cli import main; main()"]


SWAPPED = {"better": "worse", "best": "good"}
"""Words that the other weights exchange, each a token of the model."""
SWAPS = SWAPPED | {after: before for before, after in SWAPPED.items()}


def swap(text: str) -> str:
    """What the other weights make of the audio of a text."""
    return re.sub(rf"\b(?:{'|'.join(SWAPS)})\b", lambda word: SWAPS[word[0]], text)


def either(text: str) -> str:
    """A text in which it shows no more which weights each word is from."""
    return re.sub(rf"\b(?:{'|'.join(SWAPS)})\b", lambda word: min(word[0], SWAPS[word[0]]), text)


def words(text: str) -> list[str]:
    """Of a live session that moves to other weights: a word that the first have locked is another word to the second,
    which punctuate what follows by it."""
    return re.findall(r"\w+", text.casefold())


def write_other_weights(folder: Path) -> Path:
    """A checkpoint that differs by these words alone: their rows of the vocabulary are exchanged."""
    known = resolve(asr_card(MODEL))
    shutil.copytree(known, folder)
    tokenizer, tensors = load_tokenizer(known), load_file(folder / "model.safetensors")
    for before, after in SWAPPED.items():
        [first], [second] = (tokenizer.encode(f" {word}") for word in (before, after))
        for name in ("model.decoder.embed_tokens.weight", "proj_out.weight"):
            tensors[name][[first, second]] = tensors[name][[second, first]]
    save_file(tensors, folder / "model.safetensors")
    return folder


class RunningCluster:
    """`asr-serve cluster up`, and what an operator does beside it."""

    def __init__(self, folder: Path, settings: str = FILE) -> None:
        self.log = folder / "log"
        self.told: Callable[[str], str] = str
        """What its weights make of the audio of a text."""
        self.file = folder / "cluster.yaml"
        self.file.write_text(settings)
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("ASR_SERVE_", "RAY_"))}
        # Ray makes a token for a cluster that it starts, and asks for it only where it is told to.
        environ["RAY_AUTH_MODE"] = "token"
        # Memory that other programs take would have Ray kill replicas.
        environ["RAY_memory_monitor_refresh_ms"] = "0"
        self.environ = environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [*MAIN, "cluster", "up", "--config", str(self.file), "--cpus", "2"]
        with self.log.open("w") as out:
            self.process = Child(command, stdout=out, stderr=out, env=self.environ, limit_s=MODULE_LIMIT_S)
        try:
            self.url = self.said(r"serves \d+ x .* on (http://\S+)")
            self.ray = self.said(r"of Ray at ([^\s)]+)")
        except BaseException:  # who made it has nothing to close
            self.kill()
            raise

    def said(self, pattern: str) -> str:
        end_s = time.monotonic() + WAIT_S
        while (found := re.search(pattern, self.log.read_text())) is None:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end_s, self.log.read_text()
            time.sleep(0.1)
        return found[1]

    def command(self, *arguments: str) -> str:
        done = subprocess.run(
            [*MAIN, "cluster", *arguments, "--address", self.ray],
            capture_output=True,
            text=True,
            env=self.environ,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> dict[str, Any]:
        return {each["name"]: each for each in json.loads(self.command("status", "--json"))}

    def processes(self, what: str) -> list[psutil.Process]:
        """Processes of this cluster whose command line has that."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if what in " ".join(child.cmdline()):
                    found.append(child)
            except psutil.Error:
                continue
        return found

    @property
    def engines(self) -> list[psutil.Process]:
        return self.processes("asr_serve.engine.process.main")

    def transcribe(self, audio: bytes, model: str = MODEL) -> str:
        answer = httpx.post(
            f"{self.url}/v1/audio/transcriptions",
            files={"file": ("talk.wav", audio)},
            data={"model": model},
            timeout=WAIT_S,
        )
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["text"]
        return text

    def listen(self, file: Path) -> str:
        """The text of a live caller, sent as fast as it is spoken twice over."""
        done = subprocess.run(
            [*MAIN, "listen", str(file), "--server", self.url],
            capture_output=True,
            text=True,
            env=self.environ,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def gauge(self, name: str) -> float:
        """Sum of a metric over its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=WAIT_S).text
        return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))

    def close(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kills what still runs."""
        if self.process.poll() is None:
            for each in (*self.processes(""), psutil.Process(self.process.pid)):
                with contextlib.suppress(psutil.Error):  # it has ended
                    each.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    running = RunningCluster(tmp_path_factory.mktemp("cluster"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def audio(packaged_speech: Path) -> list[bytes]:
    return [(packaged_speech / name).read_bytes() for name in ("beckett.wav", "two_cities.wav")]


@pytest.fixture(scope="module")
def texts(cluster: RunningCluster, audio: list[bytes]) -> list[str]:
    found = [cluster.transcribe(each) for each in audio]
    assert "fail better" in found[0].lower()
    assert "worst of times" in found[1].lower()
    return found


@pytest.fixture(scope="module")
def quiet(cluster: RunningCluster, packaged_speech: Path) -> str:
    """The text of a live caller while nothing else happens."""
    heard = cluster.listen(packaged_speech / "two_cities.wav")
    assert "worst of times" in heard.lower()
    return heard


def wait_until(true: Any, what: Any = "it never came true") -> None:
    end_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end_s, what
        time.sleep(0.1)


def kill_under_load(cluster: RunningCluster, audio: list[bytes], live: Path, victims: Any) -> tuple[list[str], str]:
    """Texts of twelve uploads and of a live caller, while processes are killed."""
    with ThreadPoolExecutor(13) as pool:
        listening = pool.submit(cluster.listen, live)
        uploads = [pool.submit(cluster.transcribe, audio[number % 2]) for number in range(12)]
        while not any(upload.done() for upload in uploads):
            time.sleep(0.01)
        for process in victims():
            process.kill()
        return [upload.result(WAIT_S) for upload in uploads], listening.result(WAIT_S)


def test_status_shows_replicas_and_metrics_tell_them_apart(cluster, texts):
    found = cluster.status()
    assert (found[MODEL]["replicas"], found[MODEL]["wanted"], found["ingress"]["replicas"]) == (2, 2, 1)
    replicas = found[MODEL]["detail"]["replicas"]
    assert len(replicas) == 2
    assert found["ingress"]["detail"]["url"] == cluster.url
    metrics = httpx.get(f"{cluster.url}/metrics", timeout=WAIT_S).text
    assert {name for name in replicas if f'replica="{name}"' in metrics} == set(replicas)


@pytest.mark.parametrize("what", ["an engine", "a replica with its engine"])
def test_a_killed_replica_loses_nothing(cluster, audio, texts, packaged_speech, quiet, what):
    live = packaged_speech / "two_cities.wav"
    before = {process.pid for process in cluster.engines}
    assert len(before) == 2

    def victims() -> list[psutil.Process]:
        engine = cluster.engines[0]
        owner = engine.parent()
        return [engine] if what == "an engine" or owner is None else [owner, engine]

    uploads, heard = kill_under_load(cluster, audio, live, victims)
    assert uploads == [texts[number % 2] for number in range(12)]
    assert heard == quiet
    wait_until(lambda: len(cluster.engines) == 2)
    wait_until(lambda: len(cluster.status()[MODEL]["detail"].get("replicas", {})) == 2)
    assert {process.pid for process in cluster.engines} != before


def test_an_upgrade_replaces_all_replicas_under_their_callers(cluster, audio, texts, packaged_speech, quiet):
    engines = {process.pid for process in cluster.engines}
    ingress = cluster.status()["ingress"]["detail"]["pid"]
    with ThreadPoolExecutor(6) as pool:
        upgrading = pool.submit(cluster.command, "upgrade", "--config", str(cluster.file))
        stop = threading.Event()

        asking = [pool.submit(repeat, stop, cluster.transcribe, audio[number % 2]) for number in range(2)]
        talking = pool.submit(repeat, stop, cluster.listen, packaged_speech / "two_cities.wav")
        upgrading.result(WAIT_S)
        stop.set()
        assert all(set(each.result(WAIT_S)) == {texts[number]} for number, each in enumerate(asking))
        assert set(talking.result(WAIT_S)) == {quiet}
    wait_until(lambda: len(cluster.engines) == 2)
    assert not engines & {process.pid for process in cluster.engines}
    assert cluster.status()["ingress"]["detail"]["pid"] == ingress


def repeat(stop: threading.Event, ask: Callable[[Any], str], what: object) -> list[str]:
    """Answers of a client that asks the same until it is stopped."""
    found = []
    while not stop.is_set():
        found.append(ask(what))
    return found


def test_replicas_that_go_are_drained_under_load(cluster, audio, texts, packaged_speech, quiet):
    live = packaged_speech / "two_cities.wav"
    with ThreadPoolExecutor(9) as pool:
        scaling = pool.submit(cluster.command, "scale", MODEL, "1")
        listening = pool.submit(cluster.listen, live)
        stop = threading.Event()

        asking = [pool.submit(repeat, stop, cluster.transcribe, audio[number % 2]) for number in range(4)]
        scaling.result(WAIT_S)
        stop.set()
        answers = [each.result(WAIT_S) for each in asking]
        assert listening.result(WAIT_S) == quiet
    assert all(set(found) == {texts[number % 2]} for number, found in enumerate(answers))
    assert sum(map(len, answers)) > 4
    wait_until(lambda: len(cluster.engines) == 1)


def test_an_upgrade_to_other_weights_keeps_the_ingress_and_its_callers(
    cluster, audio, texts, packaged_speech, quiet, tmp_path
):
    """While both weights serve, each word is of either. No request is lost, and nothing that was said changes."""
    ingress = cluster.status()["ingress"]["detail"]["pid"]
    weights = write_other_weights(tmp_path / "other")
    cluster.file.write_text(FILE.replace("replicas: 2", f"replicas: 1, weights: {weights}"))
    assert swap(texts[0]) != texts[0]
    assert swap(quiet) != quiet
    with ThreadPoolExecutor(4) as pool:
        stop = threading.Event()

        asking = [pool.submit(repeat, stop, cluster.transcribe, audio[number % 2]) for number in range(2)]
        talking = pool.submit(repeat, stop, cluster.listen, packaged_speech / "two_cities.wav")
        try:
            cluster.command("upgrade", "--config", str(cluster.file))
            wait_until(lambda: cluster.transcribe(audio[0]) == swap(texts[0]))
        finally:
            stop.set()
        for number, each in enumerate(asking):
            assert {either(text) for text in each.result(WAIT_S)} == {either(texts[number])}
        assert all(words(either(text)) == words(either(quiet)) for text in talking.result(WAIT_S))
    cluster.told = swap
    assert [cluster.transcribe(each) for each in audio] == [swap(text) for text in texts]
    assert cluster.status()["ingress"]["detail"]["pid"] == ingress


def test_a_cluster_that_is_stopped_finishes_its_callers(cluster, audio, texts, packaged_speech, quiet):
    engines = cluster.engines
    with ThreadPoolExecutor(5) as pool:
        uploads = [pool.submit(cluster.transcribe, audio[number]) for number in range(2)]
        listening = pool.submit(cluster.listen, packaged_speech / "two_cities.wav")
        wait_until(lambda: cluster.gauge("asr_serve_live_open_sessions") == 1)
        assert cluster.close() == 0, cluster.log.read_text()
        assert [upload.result(WAIT_S) for upload in uploads] == [cluster.told(text) for text in texts]
        assert listening.result(WAIT_S) == cluster.told(quiet)
    _, alive = psutil.wait_procs(engines, 30)
    assert not alive, "engines outlive their cluster"
