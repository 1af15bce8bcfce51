"""Roles of engines that encode for others or have peers encode for them: models that support it, and builders."""

from __future__ import annotations

import hashlib
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from asr_serve import units
from asr_serve.config import EngineConfig
from asr_serve.devices.interface import Device
from asr_serve.engine.remote.encode_worker import EncodeWorker
from asr_serve.engine.remote.handshake import HandshakeSettings
from asr_serve.engine.remote.messages import EncoderIdentity
from asr_serve.engine.remote.peer_pool import PeerPool, PeerPoolSettings
from asr_serve.engine.seq2seq.encoder import EncodeRunner
from asr_serve.errors import OptionError
from asr_serve.metrics import EngineMetrics
from asr_serve.models.interfaces import EncoderDecoderModel
from asr_serve.models.registry import AnyCard, AsrCard, asr_cards
from asr_serve.types import Quantize


def uses_peers(config: EngineConfig) -> bool:
    """Returns whether this engine encodes for others, or has peers."""
    return config.role != "both" or bool(config.peers)


def quantize_mode(config: EngineConfig) -> Quantize:
    """Returns the setting `quantize`, but `none` for `auto` where engines encode for each other: which layers `auto`
    quantizes depends on the machine, and peers must compute alike."""
    return "none" if config.quantize == "auto" and uses_peers(config) else config.quantize


def validate_roles(chosen: AnyCard, config: EngineConfig) -> None:
    """Raises OptionError for a model that cannot be split between engines, and for peers of one that only
    encodes."""
    if config.role == "encode" and config.peers:
        raise OptionError("role=encode with peers", "an engine that encodes is asked, it does not ask", param="role")
    if uses_peers(config) and not _can_split(chosen):
        role = f"role={config.role}" + (" with peers" if config.peers else "")
        names = ", ".join(card.name for card in asr_cards().values() if _can_split(card))
        raise OptionError(
            f"{role}: {chosen.name} {_why_whole(chosen)}",
            f"models that hear whole utterances: {names}",
            "serve this one with role=both and without peers",
            param="role",
        )


def _can_split(chosen: AnyCard) -> bool:
    return isinstance(chosen, AsrCard) and not chosen.streaming and not chosen.incremental_encoder


def _why_whole(chosen: AnyCard) -> str:
    """Reason why a model cannot be split, as a predicate."""
    if isinstance(chosen, AsrCard):
        return "is a streaming model, whose encoder and decoder run in the same engine"
    return "synthesizes speech, and has no encoder of speech"


def checkpoint_digest(folder: Path) -> str:
    """Returns the digest of a checkpoint: of its configuration and its tensors."""
    digest = hashlib.sha256()
    for name in ("config.json", "model.safetensors"):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


class EncoderFacts(NamedTuple):
    """Properties of an encoder on its device: what peers compare, and sizes."""

    identity: EncoderIdentity
    frame_bytes: dict[str, int]
    """Bytes of one frame, by payload."""
    longest_frames: int
    samples: tuple[int, int]
    """Fewest and most samples of an utterance."""


@torch.inference_mode()
def measure_encoder(
    model: EncoderDecoderModel, device: Device, chosen: AsrCard, config: EngineConfig, weights: str
) -> EncoderFacts:
    """Measures the shapes by encoding a second of silence."""
    samples = (units.ms_to_samples(chosen.min_segment_ms), units.ms_to_samples(chosen.max_segment_ms))
    hidden, _ = model.encode([torch.zeros(max(samples[0], units.RATE_HZ))])
    cross = model.cross_keys_values(hidden)
    assert hidden.dtype == cross.dtype == device.dtype
    shapes = {"hidden": tuple(hidden.shape[1:]), "cross": tuple(cross.shape[1:])}
    identity = EncoderIdentity(
        chosen.name, weights, device.dtype_name, device.quantize, hidden=shapes["hidden"], cross=shapes["cross"]
    )
    longest = max(model.count_frames(samples[1], whole) for whole in (False, True))
    return EncoderFacts(
        identity, {payload: prod(shape) * hidden.element_size() for payload, shape in shapes.items()}, longest, samples
    )


def build_encode_worker(
    model: EncoderDecoderModel, device: Device, chosen: AsrCard, config: EngineConfig, meeting: HandshakeSettings
) -> EncodeWorker:
    """Builds the executor of an engine that encodes for others. Raises OptionError."""
    encoder = measure_encoder(model, device, chosen, config, meeting.weights)
    return EncodeWorker(
        EncodeRunner(model, device), config, encoder.identity, meeting, encoder.samples, encoder.frame_bytes
    )


def build_peer_pool(
    model: EncoderDecoderModel,
    device: Device,
    chosen: AsrCard,
    config: EngineConfig,
    meeting: HandshakeSettings,
    metrics: EngineMetrics | None,
) -> PeerPool | None:
    """Builds the pool of peers that encode for this engine; None where it has none, and cannot be told of any later,
    as one with the role decode is. Raises OptionError."""
    if not config.peers and config.role != "decode":
        return None
    encoder = measure_encoder(model, device, chosen, config, meeting.weights)
    settings = PeerPoolSettings(
        encoder.identity,
        meeting.keys,
        config.peer_transport,
        config.peer_carries,
        config.peer_timeout_s,
        encoder.frame_bytes,
        max(config.encode_frames or device.encode_frames, encoder.longest_frames),
        encoder.longest_frames,
        encoder.samples[1],
        metrics,
    )
    return PeerPool(config.peers, settings)
