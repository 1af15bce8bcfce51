"""The gate of the browser (clients/js/src/capture-worklet.js) under Node: the edge's own, to the last bit."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from asr_serve.audio import read_audio
from asr_serve.edge.speech_gate import WINDOW_SAMPLES, GateConfig, GatedSpeech
from asr_serve.edge.voice_activity import MODULE, VoiceActivityInstance, VoiceActivityModule, VoiceActivityPool

WORKLET = Path(__file__).resolve().parents[2] / "clients" / "js" / "src" / "capture-worklet.js"
RUN = """
import { readFileSync } from "node:fs";
const { SpeechGate, VoiceActivity } = await import(process.env.WORKLET);
const wasm = readFileSync(process.env.MODULE);
const pcm = new Int16Array(new Uint8Array(readFileSync(0)).buffer);
const scores = [];
const voice = new VoiceActivity(wasm);
for (let at = 0; at + 512 <= pcm.length; at += 512) scores.push(voice.probability(pcm.subarray(at, at + 512)));
const outputs = [];
const told = ({ speech, silence }) => outputs.push(speech ? [...speech] : silence);
const gate = new SpeechGate(new VoiceActivity(wasm), told, JSON.parse(process.env.OPTIONS));
for (let at = 0, size = 1; at < pcm.length; at += size, size = (7 * size + 13) % 2000 + 1) {
  gate.feed(pcm.subarray(at, at + size));
}
gate.finish();
console.log(JSON.stringify({ scores, outputs }));
"""


@pytest.mark.parametrize("config", [None, GateConfig(0.5, 0.35, 50, 30, lead_ms=0)], ids=["default", "narrow"])
def test_the_browsers_gate_is_the_edges(config: GateConfig | None, packaged_speech: Path, tmp_path: Path) -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("there is no node, or no npm")
    speech = np.rint(read_audio(packaged_speech / "beckett.wav") * 32_767).astype(np.int16)
    pcm = np.concatenate([np.zeros(20_000, np.int16), speech, np.zeros(33_333, np.int16), speech[:20_000]])
    options: dict[str, float] = {}  # the defaults are each gate's own
    if config is not None:
        options = {
            "threshold": config.threshold,
            "negThreshold": config.neg_threshold,
            "preRollMs": config.pre_roll_ms,
            "hangoverMs": config.hangover_ms,
            "leadMs": config.lead_ms,
        }
    environment = {"WORKLET": WORKLET.as_uri(), "MODULE": str(MODULE), "OPTIONS": json.dumps(options)}
    done = subprocess.run(
        [node, "--input-type=module", "--eval", RUN],
        input=pcm.tobytes(),
        env=environment,
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)

    module = VoiceActivityModule(tmp_path)
    instance = VoiceActivityInstance(module)
    instance.slot_numbers[0] = instance.acquire()
    scores = []
    for at in range(0, len(pcm) - WINDOW_SAMPLES + 1, WINDOW_SAMPLES):
        instance.input[0] = pcm[at : at + WINDOW_SAMPLES]
        instance.step(1)
        scores.append(float(instance.probabilities[0]))
    assert found["scores"] == scores

    with VoiceActivityPool(1, module).open(config) as caller:
        outputs = caller.feed(pcm) + caller.finish()
    assert runs(found["outputs"]) == runs(
        [output.samples.tolist() if isinstance(output, GatedSpeech) else output.count for output in outputs]
    )
    assert sum(isinstance(output, GatedSpeech) for output in outputs) >= 2


def runs(outputs: list[list[int] | int]) -> list[list[int] | int]:
    """Outputs with neighbours of one kind joined."""
    joined: list[list[int] | int] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if isinstance(output, list) and isinstance(last, list):
            last += output
        elif isinstance(output, int) and isinstance(last, int):
            joined[-1] = last + output
        else:
            joined.append(output)
    return joined
