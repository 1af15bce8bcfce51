"""The example that serves a model as a worker of NVIDIA Dynamo, called by Dynamo's own client in another process."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import Child

import asr_serve

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "dynamo_worker.py"
MODEL, ENDPOINT = "moonshine-tiny-en", "tests.recognizer.transcribe"
CALLER = f"""
import asyncio, json, sys
from dynamo.runtime import dynamo_worker

@dynamo_worker()
async def main(runtime):
    client = await runtime.endpoint("{ENDPOINT}").client()
    await client.wait_for_instances()

    async def call(request):
        return [response.data() async for response in await client.round_robin(request)]

    print(json.dumps(await asyncio.gather(*map(call, json.load(sys.stdin)))))

asyncio.run(main())
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    if importlib.util.find_spec("dynamo") is None:
        pytest.skip("no Dynamo here: pip install ai-dynamo-runtime")
    # Neither etcd nor NATS: workers are found by files of one folder.
    found_by = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(tmp_path / "found"), "DYN_REQUEST_PLANE": "tcp"}
    return os.environ | found_by | {"DYN_LOG": "error"}


def test_a_client_of_dynamo_gets_what_the_library_gives(environment: dict[str, str], packaged_speech: Path) -> None:
    clips = [(packaged_speech / name).read_bytes() for name in ("beckett.wav", "two_cities.wav")]
    with asr_serve.load(MODEL, turn_model="none") as model:
        expected = model.transcribe(clips)
    sent: list[dict[str, Any]] = [{"audio": base64.b64encode(clip).decode()} for clip in clips]
    sent += [{"audio": "%"}, {"audio": "AAAA"}, sent[0] | {"langage": "en"}]
    with Child([sys.executable, EXAMPLE, MODEL, ENDPOINT], env=environment) as worker:
        try:
            command = [sys.executable, "-c", CALLER]
            called = subprocess.run(
                command, env=environment, input=json.dumps(sent), capture_output=True, text=True, timeout=300
            )
            assert called.returncode == 0, called.stderr
        finally:
            worker.terminate()
    answers = json.loads(called.stdout.splitlines()[-1])
    for transcript, (*segments, done) in zip(expected, answers, strict=False):
        assert segments == [{"start_s": s.start_s, "end_s": s.end_s, "text": s.text} for s in transcript.segments]
        assert done == {"text": transcript.text, "language": "en", "duration_s": transcript.duration_s}
    for wrong, answer in zip(
        ("base64", "not a known audio container", "unknown option 'langage'"), answers[2:], strict=True
    ):
        assert wrong in answer[0]["error"]
        assert len(answer) == 1
