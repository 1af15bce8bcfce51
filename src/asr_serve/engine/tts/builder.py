"""Builder of TTS executors: finds and loads the files of a voice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from asr_serve import devices
from asr_serve.config import EngineConfig, voices_dir
from asr_serve.devices.interface import Device
from asr_serve.engine.executor import EngineComponents
from asr_serve.engine.tensor_parallel.rank_processes import not_split
from asr_serve.engine.tts.chunked_runner import ChunkedTtsRunner
from asr_serve.engine.tts.custom_voices import CustomVoiceLoader
from asr_serve.engine.tts.executor import TtsExecutor
from asr_serve.engine.tts.runner import TtsRunner, WholeTtsRunner
from asr_serve.errors import OptionError
from asr_serve.models.checkpoints import store as model_weights
from asr_serve.models.checkpoints.config_file import read_config
from asr_serve.models.interfaces import Vocoder, WholeSentenceTtsModel
from asr_serve.models.model_files import SpeechModel
from asr_serve.models.registry import TtsCard, VocoderCard, tts_model_file, vocoder_card, vocoder_cards, vocoder_file
from asr_serve.transfer.checksum import checksum, file_checksum
from asr_serve.types import Quantize


class VoiceCheckpoint(NamedTuple):
    """Files of a voice model, and of the vocoder that makes audio of its frames."""

    card: TtsCard
    folder: Path
    vocoder: VocoderCard | None
    vocoder_folder: Path | None

    @classmethod
    def find(cls, model: TtsCard, weights: str | os.PathLike[str] | None, vocoder: str | None) -> VoiceCheckpoint:
        """Finds the files. `vocoder`: another vocoder than the card names, by name or by a folder that asr-serve
        train vocoder has written. Raises UnknownModel, WeightsMissing, WeightsCorrupt, OptionError."""
        if vocoder is not None and not model.vocoder:
            raise OptionError(f"codec={vocoder}", f"{model.name} makes sound by itself", param="codec")
        chosen, vocoder_folder = find_vocoder(vocoder or model.vocoder) if model.vocoder else (None, None)
        if chosen is not None and chosen.rate_hz != model.rate_hz:
            raise OptionError(
                f"codec={chosen.name}, which makes {chosen.rate_hz} Hz",
                f"one for {model.name}: {model.rate_hz} Hz",
                param="codec",
            )
        return cls(model, model_weights.published_or_given_folder(model, weights), chosen, vocoder_folder)

    def build(
        self, device: str, dtype: str, quantize: Quantize = "none", tensor_parallel_size: int = 1
    ) -> EngineComponents:
        """Loads and packs the weights, on the thread that is to compute (decision 0005). In fp32 by default: the
        audio of a sentence does not depend on its batch. Raises OptionError for a voice that is to be split over
        processes."""
        if tensor_parallel_size > 1:
            raise not_split(self.card.name, tensor_parallel_size)
        target = devices.make_device(device, "fp32" if dtype == "auto" else dtype, quantize)
        vocoder = None
        if self.vocoder is not None and self.vocoder_folder is not None:
            vocoder = vocoder_file(self.vocoder.kind).load(self.vocoder_folder, self.vocoder, target)
        model = tts_model_file(self.card.kind).load(self.folder, self.card, target)
        return EngineComponents(model, None, target, lambda _: "", vocoder)

    def fingerprint(self) -> int:
        """Checksum of all files that an engine must share with one whose clients it takes over."""
        files = list_files(self.folder, self.card.files)
        if self.vocoder is not None and self.vocoder_folder is not None:
            files += list_files(self.vocoder_folder, self.vocoder.files)
        return checksum(repr([(name, file_checksum(path)) for name, path in files]).encode())

    def peer_identity(self, config: EngineConfig, listen: tuple[str, int], keys: tuple[str, ...]) -> None:
        """Returns None: a TTS model has no peers."""


def list_files(folder: Path, patterns: Iterable[str]) -> list[tuple[str, Path]]:
    """Returns the files of a folder, and those in subfolders that match `patterns`; or the single file. As
    (relative name, path), sorted."""
    if not folder.is_dir():
        return [(folder.name, folder)]
    matches = (path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    paths = {*model_weights.files_of(folder), *matches}
    return sorted((path.relative_to(folder).as_posix(), path) for path in paths)


def find_vocoder(named: str) -> tuple[VocoderCard, Path]:
    """Returns a vocoder and its files, by name or by a checkpoint folder. Raises UnknownModel, WeightsMissing,
    WeightsCorrupt, OptionError."""
    folder = Path(named)
    if not (folder / "config.json").is_file():
        card = vocoder_card(named)
        return card, model_weights.verified_published_folder(card)
    kind = read_config(folder, "vocoder", lambda settings: settings["model_type"])
    known = {known_card.kind: known_card for known_card in vocoder_cards().values()}
    if kind not in known:
        raise OptionError(f"codec={named}, a {kind!r}"[:200], f"one of: {', '.join(known)}", param="codec")
    return known[kind], folder


def build_tts_executor(
    model: SpeechModel,
    vocoder: Vocoder | None,
    device: Device,
    chosen: TtsCard,
    config: EngineConfig,
    on_done: Callable[[int], None],
    on_start: Callable[[list[int]], None],
) -> TtsExecutor:
    """Builds the executor of a TTS model. Raises OptionError for peers and for a role other than both."""
    if config.role != "both" or config.peers:
        raise OptionError(
            f"role={config.role} and {len(config.peers)} peers for {chosen.name}",
            "role=both and no peers: speech synthesis models do not encode for others",
            param="role",
        )
    voices = CustomVoiceLoader(model, chosen, voices_dir(config.voices_dir))
    if isinstance(model, WholeSentenceTtsModel):
        runner: TtsRunner[Any] = WholeTtsRunner(model, voices)
    else:
        assert vocoder is not None, "an acoustic model, and no vocoder"
        runner = ChunkedTtsRunner(
            model,
            vocoder,
            voices,
            device,
            rows=config.max_speaking_rows,
            step_rows=config.max_decode_rows,
            kv_bytes=config.kv_bytes,
        )
    return TtsExecutor(runner, device, on_done, on_start)
