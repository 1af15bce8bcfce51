"""Makes fixtures/deepspeech.safetensors: what the Armenian DeepSpeech graph itself answers, run by LiteRT. And
deepspeech_tiny.tflite: that graph with small random weights, whose answers are there too.

    pip install ai-edge-litert==2.3.0 numpy safetensors soxr moonshine-voice==0.1.0
    pip install --no-deps --ignore-requires-python armspeech==0.1.4
    python tests/models/generate_deepspeech.py [--espeak espeak-ng]

The graph is fed as DeepSpeech's and Coqui STT's streaming clients feed it: windows of samples to its cepstra,
cepstra with zero vectors before the first and after the last to 19 at a time, and 16 of those to its network, with
the state that the last 16 left. That runs twice: the graph as published, whose products round activations to
8 bits, and the same graph with its weights made float32 and nothing rounded. (Coqui STT 1.4.0 itself, which is for
Python 3.10, says letter for letter what the first says here, when it searches with a beam of one.)

Clips: Armenian that espeak-ng speaks (stored), white noise that fades in (stored), English that moonshine-voice
carries.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import tempfile
import wave
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import soxr
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from safetensors.numpy import save_file

FIXTURE = Path(__file__).parent / "fixtures" / "deepspeech.safetensors"
TINY = FIXTURE.with_name("deepspeech_tiny.tflite")
TEXT = "հայերն աշխարհի հնագույն ազգերից մեկն են"
ENGLISH_SAMPLES = 5 * 16_000 + 123
WINDOW, HOP, CONTEXT, STEPS = 512, 320, 9, 16
SHRUNK = {2_048: 24, 4_096: 48, 8_192: 96}
"""Sizes of the graph, and of the tiny one."""


def installed(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec, f"{module} is not installed"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def in_float(graph: bytes) -> bytes:
    """The same graph, its 8-bit weights float32: its products then do not round what they are given."""
    model = schema.ModelT.InitFromPackedBuf(graph, 0)
    for tensor in model.subgraphs[0].tensors:
        if tensor.type != schema.TensorType.INT8:
            continue
        stored = np.frombuffer(bytes(model.buffers[tensor.buffer].data), np.int8).reshape(tensor.shape)
        assert not np.any(tensor.quantization.zeroPoint)
        assert tensor.quantization.quantizedDimension == 0
        scale = np.asarray(tensor.quantization.scale, np.float32).reshape(-1, *[1] * (stored.ndim - 1))
        model.buffers[tensor.buffer].data = np.frombuffer((stored * scale).astype(np.float32).tobytes(), np.uint8)
        tensor.type, tensor.quantization = schema.TensorType.FLOAT32, None
    return packed(model)


def shrunk(graph: bytes, rng: np.random.Generator) -> bytes:
    """The same graph, smaller, its weights random: so large that letters differ from each other."""
    model = schema.ModelT.InitFromPackedBuf(graph, 0)
    for tensor in model.subgraphs[0].tensors:
        buffer = model.buffers[tensor.buffer]
        if tensor.shape is None:
            continue
        tensor.shape = np.array([SHRUNK.get(int(size), size) for size in tensor.shape], np.int32)
        if buffer.data is None:
            continue
        if tensor.type == schema.TensorType.INT8:
            buffer.data = rng.integers(-127, 128, tensor.shape).astype(np.int8).reshape(-1).view(np.uint8)
            # Cepstra are some 20 times as large as what the other layers hear.
            largest = 3.0 / np.sqrt(tensor.shape[1])
            largest *= 0.05 if b"layer_1" in tensor.name else 8 if b"layer_6" in tensor.name else 1
            # The published ones have one scale; later converters write one for each output.
            count = tensor.shape[0] if b"layer_6" in tensor.name else 1
            tensor.quantization.scale = (largest / 127 * rng.uniform(0.7, 1.3, count)).astype(np.float32)
            tensor.quantization.zeroPoint = np.zeros(count, np.int64)
        elif tensor.type == schema.TensorType.FLOAT32 and len(tensor.shape) == 1:
            buffer.data = rng.normal(0, 0.3, tensor.shape).astype(np.float32).view(np.uint8)
        elif tensor.type == schema.TensorType.INT32 and tensor.name.endswith((b"shape", b"stack_1", b"size")):
            sizes = np.frombuffer(bytes(buffer.data), np.int32)
            buffer.data = np.array([SHRUNK.get(int(size), size) for size in sizes], np.int32).view(np.uint8)
    return packed(model)


def packed(model: Any) -> bytes:
    builder = flatbuffers.Builder(1 << 20)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


class Client:
    """A graph, fed step by step."""

    def __init__(self, graph: bytes) -> None:
        # The plain kernels: what delegates compute depends on the processor.
        plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        self.graph = Interpreter(model_content=graph, num_threads=1, experimental_op_resolver_type=plain)
        self.graph.allocate_tensors()
        self.inputs = {detail["name"]: detail["index"] for detail in self.graph.get_input_details()}
        self.cell = int(self.graph.get_tensor_details()[self.inputs["previous_state_c"]]["shape"][1])
        self.outputs = {detail["name"]: detail["index"] for detail in self.graph.get_output_details()}

    def run(self, **values: np.ndarray) -> dict[str, np.ndarray]:
        for name, value in values.items():
            self.graph.set_tensor(self.inputs[name], value.astype(np.float32))
        self.graph.invoke()
        return {
            name: self.graph.get_tensor(self.outputs[name])
            for name in ("mfccs", "logits", "new_state_c", "new_state_h")
        }

    def cepstra(self, pcm: np.ndarray) -> np.ndarray:
        """(frames, 26): of each whole window, and of what is left, filled up with zeros."""
        found, at = [], 0
        while len(pcm) - at >= WINDOW:
            found.append(self.run(input_samples=pcm[at : at + WINDOW])["mfccs"][0])
            at += HOP
        left = np.pad(pcm[at:], (0, WINDOW - len(pcm[at:])))
        return np.stack([*found, self.run(input_samples=left)["mfccs"][0]])

    def posteriors(self, cepstra: np.ndarray) -> np.ndarray:
        """(frames, vocab): the graph's `logits`, which are probabilities."""
        padded = np.pad(cepstra, ((CONTEXT, CONTEXT), (0, 0)))
        heard = np.stack([padded[i : i + 2 * CONTEXT + 1] for i in range(len(cepstra))])
        c, h, found = np.zeros((1, self.cell)), np.zeros((1, self.cell)), []
        for at in range(0, len(heard), STEPS):
            batch = heard[at : at + STEPS]
            filled = np.pad(batch, ((0, STEPS - len(batch)), (0, 0), (0, 0)))
            out = self.run(input_node=filled[None], previous_state_c=c, previous_state_h=h)
            c, h = out["new_state_c"], out["new_state_h"]
            found.append(out["logits"][: len(batch)])
        return np.concatenate(found)


def letters(graph: Interpreter) -> list[str]:
    detail = next(d for d in graph.get_tensor_details() if d["name"] == "metadata_alphabet_copy")
    data: bytes = graph.get_tensor(detail["index"])[0]
    found, at = [], 2
    while at < len(data):
        length = int.from_bytes(data[at + 2 : at + 4], "little")
        found.append(data[at + 4 : at + 4 + length].decode())
        at += 4 + length
    return found


def greedy(posteriors: np.ndarray, alphabet: list[str]) -> str:
    best = posteriors.argmax(1)
    kept = [b for b, before in zip(best, [-1, *best[:-1]], strict=True) if b not in (before, len(alphabet))]
    return "".join(alphabet[b] for b in kept)


def read_wav(path: Path) -> np.ndarray:
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        pcm = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        return pcm if file.getframerate() == 16_000 else soxr.resample(pcm, file.getframerate(), 16_000)


def spoken(espeak: str) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spoken.wav"
        subprocess.run([*espeak.split(), "-v", "hy", "-s", "130", "-w", str(path), TEXT], check=True)
        return read_wav(path)


def clips(espeak: str) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(6).standard_normal(16_000 + 77) * np.linspace(0, 6_000, 16_000 + 77)
    english = read_wav(installed("moonshine_voice") / "assets" / "beckett.wav")
    return {"armenian": spoken(espeak), "noise": noise.astype(np.int16), "english": english[:ENGLISH_SAMPLES]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--espeak", default="espeak-ng", help="command of espeak-ng, with options it may need")
    parser.add_argument("--model", type=Path, help="folder of model.tflite, where armspeech is not installed")
    args = parser.parse_args()
    published = ((args.model or installed("armspeech") / "model") / "model.tflite").read_bytes()
    small = shrunk(published, np.random.default_rng(7))
    FIXTURE.parent.mkdir(exist_ok=True)
    TINY.write_bytes(small)
    rounding, exact, tiny = Client(published), Client(in_float(published)), Client(in_float(small))
    alphabet = letters(rounding.graph)
    tensors: dict[str, Any] = {}
    said: dict[str, dict[str, str]] = {}
    for name, pcm in clips(args.espeak).items():
        if name != "english":
            tensors[f"{name}.pcm"] = pcm
        cepstra = rounding.cepstra(pcm.astype(np.float32) / 32_768)
        in_bits, in_floats = rounding.posteriors(cepstra), exact.posteriors(cepstra)
        tensors |= {
            f"{name}.cepstra": cepstra,
            f"{name}.posteriors": in_floats,
            f"{name}.posteriors_rounded": in_bits.astype(np.float16),
        }
        tensors[f"{name}.posteriors_tiny"] = tiny.posteriors(cepstra)
        said[name] = {"exact": greedy(in_floats, alphabet), "rounded": greedy(in_bits, alphabet)}
        print(name, len(pcm), len(cepstra), np.abs(in_bits - in_floats).max(), said[name])
    versions = {name: importlib.metadata.version(name) for name in ("ai-edge-litert", "armspeech", "numpy")}
    save_file(
        {name: np.ascontiguousarray(value) for name, value in tensors.items()},
        FIXTURE,
        {"versions": json.dumps(versions), "greedy": json.dumps(said, ensure_ascii=False), "spoken": TEXT},
    )


if __name__ == "__main__":
    main()
