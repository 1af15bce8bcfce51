"""A real Ray with a deployment for each model and role: one that is split, one that streams, one that speaks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cloned_twin import twin
from engine_clients import NEMO, NEMO_MODEL

pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")

from test_ray_cluster import MODEL, WAIT_S, RunningCluster, wait_until

import asr_serve
from asr_serve.cloning.base_model import checkpoint_fingerprint
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import tts_card, vocoder_card
from asr_serve.voices.voice_store import VoiceStore

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

VOICE = "fastpitch-en"
ENCODE = f"{MODEL}:encode"
UPLOADS = 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    card = tts_card(VOICE)
    if store.locate(card) is None or store.locate(vocoder_card(card.vocoder)) is None:
        pytest.skip(f"the weights of {VOICE} are not on this machine")
    voices = VoiceStore(tmp_path_factory.mktemp("voices"))
    twin(voices, "twin", {"fingerprint": checkpoint_fingerprint(store.verified_published_folder(card))})
    engine = {"prefix_bytes": 0, "encode_frames": 400, "voices_dir": str(voices.folder)}
    settings = {  # five times 0.4: room for one more, on two cores
        "models": [
            {"model": MODEL, "role": "encode", "cpus": 0.4, "dtype": "fp32"},
            {"model": MODEL, "role": "decode", "cpus": 0.4, "dtype": "fp32"},
            {"model": NEMO_MODEL, "weights": str(NEMO), "cpus": 0.4},
            {"model": VOICE, "cpus": 0.4},
        ],
        "replica_silent_s": 5,
        "serve": {"port": 0, "turn_model": "none", "drain_s": 100, "engine": engine},
    }
    running = RunningCluster(tmp_path_factory.mktemp("cluster"), json.dumps(settings))
    yield running
    running.close()


@pytest.fixture(scope="module")
def audio(packaged_speech: Path) -> list[bytes]:
    return [(packaged_speech / name).read_bytes() for name in ("beckett.wav", "two_cities.wav")]


@pytest.fixture(scope="module")
def undivided(audio: list[bytes]) -> list[str]:
    """Texts of one engine that does everything."""
    with asr_serve.load(MODEL, device="cpu", dtype="fp32", turn_model="none") as model:
        return [each.text for each in model.transcribe(audio)]


def peers(cluster: RunningCluster) -> dict[str, str]:
    """State of the encode replicas at the decode replica, by address."""
    replicas = cluster.status()[MODEL]["detail"].get("replicas", {})
    return {address: state for each in replicas.values() for address, state in (each["peers"] or {}).items()}


def connected(cluster: RunningCluster, count: int = 1) -> None:
    """Waits until the decode replica has that many encode replicas, and no others."""
    wait_until(lambda: list(peers(cluster).values()) == ["ready"] * count, lambda: peers(cluster))


def encoder(cluster: RunningCluster) -> tuple[psutil.Process, psutil.Process]:
    """Actor of the encode replica, and its engine."""
    for engine in cluster.engines:
        owner = engine.parent()
        if owner is not None and ENCODE in " ".join(owner.cmdline()):
            return owner, engine
    raise AssertionError("no encode replica")


def test_each_deployment_has_its_role(cluster: RunningCluster) -> None:
    found = {name: each["role"] for name, each in cluster.status().items()}
    roles = {ENCODE: "encode", MODEL: "decode", NEMO_MODEL: "stream", VOICE: "speak", "ingress": "ingress"}
    assert found == roles
    connected(cluster)
    shown = cluster.command("status")
    row = rf"^{ENCODE} +encode +HEALTHY +1 of 1 +127\.0\.0\.1:\d+: 1 connected"
    assert re.search(row, shown, re.MULTILINE), shown


@pytest.mark.parametrize("what", ["an engine", "a replica with its engine"])
def test_a_killed_encoder_loses_nothing(cluster, audio, undivided, what) -> None:
    connected(cluster)
    before = cluster.gauge("asr_serve_peer_batches_total")
    assert cluster.transcribe(audio[1]) == undivided[1]
    encoded = cluster.gauge("asr_serve_peer_batches_total")
    assert encoded > before, "the decode replica encoded by itself"
    old = peers(cluster).keys()
    with ThreadPoolExecutor(UPLOADS) as pool:
        uploads = [pool.submit(cluster.transcribe, audio[number % 2]) for number in range(UPLOADS)]
        wait_until(lambda: cluster.gauge("asr_serve_peer_batches_total") > encoded)
        owner, engine = encoder(cluster)
        for process in [engine] if what == "an engine" else [owner, engine]:
            process.kill()
        assert [each.result(WAIT_S) for each in uploads] == [undivided[number % 2] for number in range(UPLOADS)]
    wait_until(lambda: not old & peers(cluster).keys())  # its next engine listens elsewhere
    connected(cluster)
    before = cluster.gauge("asr_serve_peer_batches_total")
    assert cluster.transcribe(audio[1]) == undivided[1]
    assert cluster.gauge("asr_serve_peer_batches_total") > before
    assert cluster.gauge("asr_serve_failed_steps_total") == 0


def test_encoders_come_and_go_under_load(cluster, audio, undivided) -> None:
    connected(cluster)
    failures = cluster.gauge("asr_serve_peer_failures_total")
    with ThreadPoolExecutor(5) as pool:
        for count in (2, 1):
            scaling = pool.submit(cluster.command, "scale", ENCODE, str(count))
            while not scaling.done():
                asking = [pool.submit(cluster.transcribe, audio[number % 2]) for number in range(4)]
                assert [each.result(WAIT_S) for each in asking] == [*undivided, *undivided]
            scaling.result()
            connected(cluster, count)
    assert cluster.gauge("asr_serve_peer_failures_total") == failures, "one that goes away is left, not lost"


def test_speech_and_a_cloned_voice(cluster: RunningCluster) -> None:
    def speak(**members: Any) -> bytes:
        body = {"model": VOICE, "input": "It was the best of times.", "response_format": "pcm", "seed": 1, **members}
        answer = httpx.post(f"{cluster.url}/v1/audio/speech", json=body, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        return answer.content

    own = speak(voice="heart")
    assert len(own) > 24_000
    assert speak(voice="twin") == own
    assert speak(voice="adam") != own
    listed = httpx.get(f"{cluster.url}/v1/audio/voices", timeout=WAIT_S).json()
    assert "twin" in json.dumps(listed)


def test_a_streaming_model_hears_a_file_and_a_caller(cluster, audio, packaged_speech) -> None:
    with asr_serve.load(NEMO_MODEL, weights=NEMO, device="cpu", turn_model="none") as model:
        alone = model.transcribe(audio[0])[0].text
    assert alone
    assert cluster.transcribe(audio[0], NEMO_MODEL) == alone
