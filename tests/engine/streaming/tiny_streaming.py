"""Streaming models of random weights, and sessions through the wrapper, in any company."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import tiny_configs
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from asr_serve.decoding.ctc import CtcBeamOptions, CtcGreedy, CtcPrefixBeam
from asr_serve.decoding.ctc_batched import BatchedCtcPrefixBeam
from asr_serve.decoding.rnnt import TransducerGreedy
from asr_serve.decoding.rnnt_beam import TransducerBeam
from asr_serve.devices.cpu import CpuDevice
from asr_serve.engine.streaming.model_runner import ChunkedModelRunner, StreamingSession
from asr_serve.models.asr import deepspeech
from asr_serve.models.asr.kaldi_chain import conversion, kaldi_chain
from asr_serve.models.asr.moonshine import moonshine_streaming
from asr_serve.models.asr.nemo import fastconformer
from asr_serve.models.asr.wenet import u2pp
from asr_serve.models.interfaces import NBestHypothesis, SearchResult, SearchToken, State, StateSpec, StreamingChunk

FIXTURES = Path(__file__).parents[2] / "models" / "fixtures"
TDT = (0, 1, 2, 4)


@cache
def device(dtype: torch.dtype = torch.float32) -> CpuDevice:
    return CpuDevice(dtype)


@cache
def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """`name`: kind, and what is special: fastconformer 8,3 looks back 8 frames and ahead 3."""
    kind, _, what = name.partition(" ")
    torch.manual_seed(11)
    match kind:
        case "fastconformer" | "tdt":
            left, right = map(int, (what or "8,1").split(","))
            config = msgspec.structs.replace(tiny_configs.fastconformer_config(), att_context_size=((left, right),))
            if kind == "tdt":
                config = msgspec.structs.replace(config, durations=TDT, heads=("tdt",))
            return fastconformer.Model(config, weights(config), device(dtype))
        case "u2pp":
            held = load_file(FIXTURES / "u2pp.safetensors")
            given = {
                key.removeprefix("conv2d/weights/"): each for key, each in held.items() if "conv2d/weights/" in key
            }
            config = msgspec.structs.replace(tiny_configs.u2pp_config(), left_chunks=int(what or 2))
            return u2pp.Model(config, {u2pp.rename(k): v for k, v in given.items() if u2pp.rename(k)}, device(dtype))
        case "moonshine":
            return moonshine(dtype)
        case "deepspeech":
            config = tiny_configs.deepspeech_config()
            tensors = {name: 2 * torch.randn(shape) / shape[-1] ** 0.5 for name, shape in config.shapes().items()}
            tensors["layers.0.weight"] /= 10
            return deepspeech.Model(config, tensors, device(dtype))
        case "kaldi_chain":
            return ReferencedChain(dtype)
    raise ValueError(name)


class Encoder:
    """Moonshine Streaming's, which hears utterances too."""

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def encode_utterance(self, pcm: Tensor) -> Tensor:
        frames = self._encoder.count_frames(len(pcm))
        return self._encoder.encode_clips([pcm])[0][None, :frames] if frames else torch.empty(1, 0, 1)


def moonshine(dtype: torch.dtype) -> Encoder:
    with safe_open(FIXTURES / "moonshine_streaming.safetensors", "pt") as file:
        config = json.loads(file.metadata()["said"])["wide"]["config"]
        prefix = "wide.weights."
        tensors = {n.removeprefix(prefix): file.get_tensor(n) for n in file.keys() if n.startswith(prefix)}  # noqa: SIM118
    made = moonshine_streaming.Model(moonshine_streaming.Config.of(config), tensors, device(dtype))
    return Encoder(made.encoder)


class ReferencedChain:
    """A chain model of random weights; whole utterances are evaluated from its files."""

    def __init__(self, dtype: torch.dtype) -> None:
        sys.path.insert(0, str(FIXTURES.parent))
        try:
            import tiny_kaldi
            from kaldi_reference import Reference, cepstra_of
        finally:
            sys.path.pop(0)
        with tempfile.TemporaryDirectory() as folder:
            tiny_kaldi.write_model(Path(folder), 7)
            settings, tensors, _ = conversion.read_acoustics(Path(folder))
            self._model = kaldi_chain.Model(kaldi_chain.Config.of(settings | {"vocab_size": 1}), tensors, device(dtype))
            pdfs = self._model.config.silence_pdfs
            context = {"left": tiny_kaldi.LEFT, "right": tiny_kaldi.RIGHT}
            self._reference = Reference(Path(folder), silence_pdfs=pdfs, block=self._model.block, **context)
        self._cepstra_of = cepstra_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode_utterance(self, pcm: Tensor) -> Tensor:
        if not len(pcm):
            return torch.empty(1, 0, self._model.network.output_width)
        scores, _ = self._reference.scores(self._cepstra_of(self._model, pcm.numpy()))
        return torch.from_numpy(scores).float()[None]


def weights(config: fastconformer.Config) -> dict[str, Tensor]:
    sys.path.insert(0, str(FIXTURES.parent))
    try:
        from tiny_fastconformer import weights as of
    finally:
        sys.path.pop(0)
    return of(config)


class Silent:
    """For an encoder that is read by a decoder of whole utterances: says nothing."""

    def __init__(self, model: Any) -> None:
        pass

    def state_specs(self) -> dict[str, StateSpec]:
        return {}

    def step(self, hidden: Tensor, chunk: StreamingChunk, state: State) -> list[SearchResult]:
        return [SearchResult([], []) for _ in chunk.rows]

    def finish(self, row: int, state: State) -> list[NBestHypothesis]:
        return [NBestHypothesis([], 0.0)]


SEARCHES: dict[str, Callable[[Any], Any]] = {
    "none": Silent,
    "ctc": CtcGreedy,
    "ctc beam": lambda model: CtcPrefixBeam(model, 4),
    "ctc batched": lambda model: BatchedCtcPrefixBeam(model, model.device, CtcBeamOptions(4)),
    "rnnt": lambda model: TransducerGreedy(model.transducer),
    "rnnt beam": lambda model: TransducerBeam(model.transducer, 3),
}


class Recorded:
    """A search, and all that it was given, by row."""

    def __init__(self, search: Any) -> None:
        self.search = search
        self.hidden: dict[int, list[Tensor]] = defaultdict(list)
        self.batches: list[int] = []

    def state_specs(self) -> dict[str, StateSpec]:
        return self.search.state_specs()

    def step(self, hidden: Tensor, chunk: StreamingChunk, state: State) -> list[SearchResult]:
        self.batches.append(len(chunk.rows))
        for row, frames, each in zip(chunk.rows.tolist(), chunk.frames.tolist(), hidden, strict=True):
            self.hidden[row].append(each[:frames].clone())
        return self.search.step(hidden, chunk, state)

    def finish(self, row: int, state: State) -> list[NBestHypothesis]:
        return self.search.finish(row, state)


class Said(NamedTuple):
    """Of one session: its tokens, and the encoder's output."""

    tokens: list[SearchToken]
    hidden: Tensor


class Company:
    """Sessions that come, speak in pieces, and go, as chance has it."""

    def __init__(
        self,
        model: Any,
        search: str,
        chunk: int,
        *,
        chunked: bool,
        slots: int = 5,
        live: float = 0.7,
        device: Any = None,
        **options: Any,
    ) -> None:
        """`live`: how many of the sessions are a caller's; the others are recordings."""
        self.search = Recorded(SEARCHES[search](model))
        self._live = live
        self.wrapper = ChunkedModelRunner(
            model,
            self.search,
            device or model.device,
            slots=slots,
            chunk=chunk,
            use_chunked_inference=chunked,
            poison=True,
            **options,
        )
        self.now_ms = 0.0
        self.said: dict[int, Said] = {}
        self._tokens: dict[StreamingSession, list[SearchToken]] = {}

    def hear(self, clips: list[np.ndarray], chance: random.Random) -> dict[int, Said]:
        """All of them, a few at once; what each says."""
        waiting = list(enumerate(clips))
        on: dict[int, tuple[StreamingSession, np.ndarray]] = {}
        while waiting or on:
            if waiting and self.wrapper.free_sessions and chance.random() < 0.4:
                number, clip = waiting.pop(0)
                session = self.wrapper.open_session(live=chance.random() < self._live)
                self._tokens[session] = []
                on[number] = session, clip
            for number, (session, clip) in list(on.items()):
                if session.finished:
                    self._leave(number, session)
                    del on[number]
                elif len(clip) and chance.random() < 0.6:
                    cut = chance.choice((160, 900, 2_560, 5_121, 40_000))
                    self.wrapper.append_audio(session, clip[:cut], self.now_ms)
                    on[number] = session, clip[cut:]
                elif not len(clip) and not session.audio_buffer.ended:
                    self.wrapper.finish_audio(session, self.now_ms)
            self.now_ms += chance.choice((0.0, 5.0, 30.0))
            self.advance()
        self.wrapper.states.check()
        return self.said

    def advance(self) -> None:
        for session, found in (
            self.wrapper.step(running, self.now_ms) if (running := self.wrapper.schedule(self.now_ms)) else []
        ):
            self._tokens[session] += found.fixed_tokens

    def _leave(self, number: int, session: StreamingSession) -> None:
        row = session.slot.row
        hidden = self.search.hidden.pop(row, [])
        tokens = self._tokens.pop(session) + session.hypotheses[0].tokens
        self.said[number] = Said(tokens, torch.cat(hidden) if hidden else torch.empty(0))
        self.wrapper.close_session(session)


def clips(seed: int, count: int = 6) -> list[np.ndarray]:
    """Noise that comes and goes, of any length, the shortest of nothing at all."""
    chance = np.random.default_rng(seed)
    found = []
    for number in range(count):
        samples = 0 if number == 1 else int(chance.integers(100, 48_000))
        loudness = np.repeat(chance.random(samples // 1_600 + 1), 1_600)[:samples]
        found.append((0.3 * loudness * chance.standard_normal(samples)).astype(np.float32))
    return found
