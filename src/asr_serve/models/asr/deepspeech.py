"""DeepSpeech: character probabilities from windows of 19 cepstral frames, and a forward LSTM.

Three dense layers read a frame with nine on either side, an LSTM carries state, a dense layer and the output
follow. A session's audio advances in hops of 320 samples; before its start and after its end the cepstra are
zeros, not cepstra of silence. The characters of a frame need 9 * 20 + 32 ms of audio from the frame's start.

Source   Hannun et al. 2014 (arXiv:1412.5567) with an LSTM, as in Mozilla DeepSpeech 0.9 and Coqui STT 1.4;
         tests/models/test_deepspeech.py compares with the graph itself, run by LiteRT and fed as they feed it
Weights  `model.tflite` of such a model, 8-bit, converted to float32. The published graph rounds activations to
         8 bits too, frame by frame; here they are not rounded
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from asr_serve import units
from asr_serve.audio.features.mfcc import Mfcc, MfccShape
from asr_serve.devices.interface import Device, Linear
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.checkpoints import tflite_graph
from asr_serve.models.interfaces import AudioWindow, State, StateSpec, StreamingChunk, StreamingModel
from asr_serve.models.model_files import AsrModelConfig, WeightsConverter
from asr_serve.models.registry import AsrCard, PackagedWeights

CARDS = (
    AsrCard(
        name="armspeech-hy",
        task="asr",
        kind="deepspeech",
        languages=("hy",),
        parameters=47_250_000,
        licence="MIT",
        source="arXiv:1412.5567",
        hub="",
        packaged=PackagedWeights(
            # Its metadata allows Python 3.10 at most and requires the runtime that it wraps: only its file is
            # read.
            requirement="--no-deps --ignore-requires-python armspeech==0.1.4",
            module="armspeech",
            folder="model",
            sha256={"model.tflite": "3b834da11f2d0a1a5079b44dd5d5da2b1955dec56474ba11b4c3793e934787bc"},
        ),
        files=("config.json", "model.safetensors", "pieces.json"),
        heads=("ctc",),
        chunk=16,
        frame_samples=320,
        lookahead_samples=3_072,
        max_segment_ms=30_000,
        min_segment_ms=100,
        # A character is a token; 25 of them a second is faster than anybody speaks.
        tokens_per_s=25.0,
    ),
)
GATES = "ifgo"
"""Input, forget, cell, output: order of the gates in an LSTM's weights here, and in torch."""


class Config(AsrModelConfig, frozen=True, kw_only=True):
    """Sizes of the network and its features."""

    vocab_size: int = 29
    """Number of tokens; the blank is included, and last."""
    hidden_size: int = 2_048
    cell_size: int = 2_048
    context_frames: int = 9
    """Frames of context on each side."""
    relu_clip: float = 20.0
    window_samples: int = 512
    hop_samples: int = 320
    mels: int = 40
    coefficients: int = 26
    low_hz: float = 20.0
    high_hz: float = 8_000.0

    @property
    def ctc_blank_id(self) -> int:
        return self.vocab_size - 1

    @property
    def features(self) -> MfccShape:
        return MfccShape(self.window_samples, self.hop_samples, self.mels, self.coefficients, self.low_hz, self.high_hz)

    @property
    def input_frames(self) -> int:
        """Frames that the first layer reads together."""
        return 2 * self.context_frames + 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a checkpoint's tensors, by name."""
        sizes = {
            "layers.0": (self.hidden_size, self.input_frames * self.coefficients),
            "layers.1": (self.hidden_size, self.hidden_size),
            "layers.2": (self.hidden_size, self.hidden_size),
            "lstm.input": (4 * self.cell_size, self.hidden_size),
            "layers.3": (self.hidden_size, self.cell_size),
            "head": (self.vocab_size, self.hidden_size),
        }
        shapes: dict[str, tuple[int, ...]] = {"lstm.recurrent.weight": (4 * self.cell_size, self.cell_size)}
        for name, size in sizes.items():
            shapes |= {f"{name}.weight": size, f"{name}.bias": size[:1]}
        return shapes


class Model(StreamingModel):
    """StreamingModel (models/interfaces.py) with the head ctc.

    Out     input of the output layer (n, chunk, hidden_size), in the device's dtype
    State   h, c (cell_size,): the LSTM's output and cell, float32 on every device
    """

    frame_block = 1
    heads = ("ctc",)

    def __init__(self, config: Config, tensors: dict[str, Tensor], device: Device) -> None:
        self.config, self.device = config, device
        self.frame_samples, self.vocab_size, self.blank_id = (
            config.hop_samples,
            config.vocab_size,
            config.ctc_blank_id,
        )
        for name, shape in config.shapes().items():
            if name not in tensors:
                raise WeightsCorrupt(f"the checkpoint has no tensor {name}", "a DeepSpeech checkpoint has it")
            if tensors[name].shape != shape:
                raise WeightsCorrupt(f"{name} is {tuple(tensors[name].shape)}", f"config.json makes it {shape}")

        def linear(name: str, dtype: torch.dtype | None = None) -> Linear:
            bias = tensors.get(f"{name}.bias")
            return device.linear(
                tensors[f"{name}.weight"].float().to(device.torch_device),
                None if bias is None else bias.float().to(device.torch_device),
                dtype,
            )

        self.features = Mfcc(config.features).to(device.torch_device)
        # Cepstra are large, and differences between them are small: bf16's 8 bits are too few.
        self.before = [linear("layers.0", torch.float32), linear("layers.1"), linear("layers.2")]
        self.lstm_input, self.lstm_recurrent = linear("lstm.input"), linear("lstm.recurrent")
        self.after, self.head = linear("layers.3"), linear("head")

    def count_frames(self, samples: int) -> int:
        """Returns one frame for each whole window, and one for the rest after the last; 0 for no audio."""
        config = self.config
        return max(1, (samples - config.window_samples) // config.hop_samples + 2) if samples > 0 else 0

    def audio_window(self, chunk: int) -> AudioWindow:
        config = self.config
        hops = chunk + 2 * config.context_frames - 1
        return AudioWindow(
            config.context_frames * config.hop_samples, hops * config.hop_samples + config.window_samples
        )

    def state_specs(self, chunk: int) -> dict[str, StateSpec]:
        return {name: StateSpec((self.config.cell_size,)) for name in ("h", "c")}

    def step(self, chunk: StreamingChunk, state: State) -> Tensor:
        config = self.config
        cepstra = self.features(chunk.pcm)
        frame = chunk.start_frames[:, None] - config.context_frames
        frame = frame + torch.arange(cepstra.shape[1], device=cepstra.device)
        count = torch.div(chunk.total_samples - config.window_samples, config.hop_samples, rounding_mode="floor") + 2
        inside = (frame >= 0) & (frame < count.clamp(min=1)[:, None])
        cepstra = torch.where(inside[:, :, None], cepstra, 0.0)
        h, c = state["h"][chunk.rows], state["c"][chunk.rows]
        hidden, h, c = self._encode(cepstra, chunk.frames, h, c)
        state["h"][chunk.rows], state["c"][chunk.rows] = h, c
        return hidden

    def encode_utterance(self, pcm: Tensor) -> Tensor:
        """Encodes a whole utterance (samples,) at once: (1, frames, hidden_size). Reference for tests."""
        config = self.config
        count = self.count_frames(pcm.shape[0])
        if not count:
            return torch.empty(1, 0, config.hidden_size, dtype=self.device.dtype, device=self.device.torch_device)
        missing = (count - 1) * config.hop_samples + config.window_samples - pcm.shape[0]
        cepstra = self.features(F.pad(pcm[None].to(self.device.torch_device), (0, missing)))
        cepstra = F.pad(cepstra, (0, 0, config.context_frames, config.context_frames))
        fresh = cepstra.new_zeros(1, config.cell_size)
        return self._encode(cepstra, torch.tensor([count], device=cepstra.device), fresh, fresh)[0]

    def ctc_logprobs(self, hidden: Tensor) -> Tensor:
        return F.log_softmax(self.head(hidden).float(), dim=-1).contiguous()

    def _encode(self, cepstra: Tensor, frames: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encodes cepstra (n, frames + 2 * context, coefficients) from h and c (n, cell_size). Returns hidden (n,
        frames, hidden_size), and h and c after `frames[i]` frames of row i."""
        # Frames first: the LSTM steps through frames, all rows at once.
        windows = cepstra.unfold(1, self.config.input_frames, 1).permute(1, 0, 3, 2).flatten(2)
        x = windows
        for layer in self.before:
            x = self._clipped(layer(x)).to(self.device.dtype)
        gates = self.lstm_input(x)
        out = x.new_empty(*x.shape[:2], self.config.cell_size)
        for t in range(len(gates)):
            i, f, g, o = self.lstm_recurrent(h.to(x.dtype), add=gates[t]).float().chunk(len(GATES), dim=1)
            live = (t < frames)[:, None]
            c = torch.where(live, f.sigmoid() * c + i.sigmoid() * g.tanh(), c)
            h = torch.where(live, o.sigmoid() * c.tanh(), h)
            out[t] = h
        return self._clipped(self.after(out)).transpose(0, 1).contiguous(), h, c

    def _clipped(self, x: Tensor) -> Tensor:
        return x.clamp_(0.0, self.config.relu_clip)


# --- the package's graph, read once ----------------------------------------------------------------------

_DENSE = ("layers.0", "layers.1", "layers.2", "lstm", "layers.3", "head")
"""Matrix products of the graph, in the order in which they run."""


def is_package_folder(folder: Path) -> bool:
    """Returns whether `folder` holds a graph as DeepSpeech and Coqui STT publish it."""
    return folder.is_dir() and len(list(folder.glob("*.tflite"))) == 1


def convert(source: Path, target: Path) -> None:
    """Dequantizes the graph of `source` into a checkpoint in `target`. Raises WeightsCorrupt."""
    (path,) = source.glob("*.tflite")
    graph = tflite_graph.read(path)
    tensors = _tensors(graph)
    alphabet = _alphabet(graph)
    config = _config(graph, tensors)
    if config.vocab_size != len(alphabet) + 1:
        raise WeightsCorrupt(f"{path} has {config.vocab_size} outputs", f"{len(alphabet)} letters and a blank")
    for name, shape in config.shapes().items():
        if tensors[name].shape != shape:
            raise WeightsCorrupt(f"{name} of {path} is {tensors[name].shape}", f"a DeepSpeech has {shape} there")
    settings = {"model_type": "deepspeech", **msgspec.to_builtins(config)}
    (target / "config.json").write_text(json.dumps(settings, indent=1))
    pieces = [*(letter.replace(" ", "\u2581") for letter in alphabet), ""]
    (target / "pieces.json").write_text(json.dumps(pieces, ensure_ascii=False), encoding="utf-8")
    save_file(
        {name: torch.from_numpy(np.array(value)) for name, value in tensors.items()}, target / "model.safetensors"
    )


CONVERTER = WeightsConverter(is_package_folder, convert)


def _tensors(graph: tflite_graph.TfliteGraph) -> dict[str, np.ndarray]:
    products = {call.inputs[1]: call for call in graph.operations_named("FULLY_CONNECTED") if len(call.inputs) == 3}
    if len(products) != len(_DENSE):
        raise WeightsCorrupt(f"{graph.path} has {len(products)} weight matrices", f"a DeepSpeech: {len(_DENSE)}")
    by_name = dict(zip(_DENSE, products.values(), strict=True))
    tensors: dict[str, np.ndarray] = {}
    for name, (_, weight, bias) in ((name, product.inputs) for name, product in by_name.items()):
        tensors |= {f"{name}.weight": graph.constant(weight), f"{name}.bias": graph.constant(bias)}
    # One matrix for the input and the LSTM's last output, its gates in an order of its own.
    weights, biases = (np.split(tensors.pop(f"lstm.{kind}"), len(GATES)) for kind in ("weight", "bias"))
    order = _gate_order(graph, by_name["lstm"].inputs[1])
    recurrent_and_input, inputs = (np.concatenate([weights[i] for i in order]), weights[0].shape[1] - len(weights[0]))
    return tensors | {
        "lstm.input.weight": recurrent_and_input[:, :inputs],
        "lstm.input.bias": np.concatenate([biases[i] for i in order]),
        "lstm.recurrent.weight": recurrent_and_input[:, inputs:],
    }


def _gate_order(graph: tflite_graph.TfliteGraph, weight: int) -> list[int]:
    """Returns for each of GATES its part of the LSTM's product, identified by the operations of the first step."""
    first = next(call for call in graph.operations_named("FULLY_CONNECTED") if call.inputs[1] == weight)
    parts = next((call.outputs for call in graph.operations_named("SPLIT") if first.outputs[0] in call.inputs), ())
    joined = graph.producer(first.inputs[0])
    gates = {_gate(graph, part, parts): i for i, part in enumerate(parts)}
    if not joined or joined.inputs[-1] != graph.named("previous_state_h") or sorted(gates) != sorted(GATES):
        raise WeightsCorrupt(f"{graph.path} has no LSTM as DeepSpeech has it", "gates i f g o, no forget bias")
    return [gates[gate] for gate in GATES]


def _gate(graph: tflite_graph.TfliteGraph, part: int, parts: tuple[int, ...]) -> str:
    """Returns one of GATES, or "" where another operation comes first, such as an added forget bias."""
    active = next((call for call in graph.operations if part in call.inputs), None)
    if active is None or active.name not in ("LOGISTIC", "TANH"):
        return ""
    if active.name == "TANH":
        return "g"
    product = next((call for call in graph.operations_named("MUL") if active.outputs[0] in call.inputs), None)
    if product is None:
        return ""
    if graph.named("previous_state_c") in product.inputs:
        return "f"
    squashed = [call for i in product.inputs if (call := graph.producer(i)) and call.name == "TANH"]
    return "i" if any(call.inputs[0] in parts for call in squashed) else "o"


def _config(graph: tflite_graph.TfliteGraph, tensors: dict[str, np.ndarray]) -> Config:
    spectrograms, cepstra = graph.operations_named("AudioSpectrogram"), graph.operations_named("Mfcc")
    clip = {float(graph.constant(call.inputs[1])) for call in graph.operations_named("MINIMUM")}
    if len(spectrograms) != 1 or len(cepstra) != 1 or len(clip) != 1:
        raise WeightsCorrupt(f"{graph.path} is no DeepSpeech", "AudioSpectrogram, Mfcc, and ReLUs clipped alike")
    window, bands = spectrograms[0].option, cepstra[0].option
    rate_hz = int(graph.constant(cepstra[0].inputs[1]))
    if rate_hz != units.RATE_HZ or not window("magnitude_squared"):
        raise WeightsCorrupt(f"{graph.path} hears {rate_hz} Hz", f"{units.RATE_HZ} Hz, squared magnitudes")
    coefficients = int(bands("dct_coefficient_count"))
    return Config(
        vocab_size=len(tensors["head.weight"]),
        hidden_size=len(tensors["layers.0.weight"]),
        cell_size=tensors["lstm.recurrent.weight"].shape[1],
        context_frames=(tensors["layers.0.weight"].shape[1] // coefficients - 1) // 2,
        relu_clip=clip.pop(),
        window_samples=int(window("window_size")),
        hop_samples=int(window("stride")),
        mels=int(bands("filterbank_channel_count")),
        coefficients=coefficients,
        low_hz=bands("lower_frequency_limit"),
        high_hz=bands("upper_frequency_limit"),
    )


def _alphabet(graph: tflite_graph.TfliteGraph) -> list[str]:
    """Reads the characters by id: their count, then id, length in bytes and bytes of each; numbers have 16 bits."""
    producer = graph.producer(graph.named("metadata_alphabet"))
    data = graph.text(producer.inputs[0] if producer else graph.named("metadata_alphabet"))
    try:
        (count,), offset, letters = struct.unpack_from("<H", data), 2, {}
        for _ in range(count):
            letter, length = struct.unpack_from("<HH", data, offset)
            letters[letter] = data[offset + 4 : offset + 4 + length].decode()
            offset += 4 + length
        return [letters[i] for i in range(count)]
    except (struct.error, UnicodeDecodeError, KeyError) as failure:
        raise WeightsCorrupt(f"{graph.path} has no alphabet: {failure!r}", "as DeepSpeech writes it") from failure
