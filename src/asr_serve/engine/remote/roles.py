"""Encoding in one engine and decoding in another: which models can, and how either side is put together."""

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
from asr_serve.models.registry import AsrCard, asr_cards


def uses_peers(config: EngineConfig) -> bool:
    """Whether this engine has to do with others."""
    return config.role != "both" or bool(config.peers)


def validate_roles(chosen: AsrCard, config: EngineConfig) -> None:
    """Raises OptionError for a model of which one engine cannot do a part, and for peers of one that only
    encodes."""
    if config.role == "encode" and config.peers:
        raise OptionError(
            "role=encode with peers", "an engine that encodes is asked, it does not ask", param="role"
        )
    if uses_peers(config) and not _can_split(chosen):
        what = f"role={config.role}" + (" with peers" if config.peers else "")
        names = ", ".join(card.name for card in asr_cards().values() if _can_split(card))
        raise OptionError(
            f"{what}: {chosen.name} hears while somebody speaks, its encoder and decoder hand in hand",
            f"models that hear whole utterances: {names}",
            "serve this one with role=both and without peers",
            param="role",
        )


def _can_split(chosen: AsrCard) -> bool:
    return not chosen.streaming and not chosen.incremental_encoder


def checkpoint_digest(folder: Path) -> str:
    """Of a checkpoint: what it computes."""
    found = hashlib.sha256()
    for name in ("config.json", "model.safetensors"):
        with (folder / name).open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


class EncoderFacts(NamedTuple):
    """Of a model on its device: what peers compare, and how large things are."""

    identity: EncoderIdentity
    frame_bytes: dict[str, int]
    """Of one frame, by what is carried."""
    longest_frames: int
    samples: tuple[int, int]
    """The fewest and the most of an utterance."""


@torch.inference_mode()
def measure_encoder(
    model: EncoderDecoderModel, device: Device, chosen: AsrCard, config: EngineConfig, weights: str
) -> EncoderFacts:
    """What the encoder makes of a second of silence tells the shapes."""
    samples = (units.ms_to_samples(chosen.min_segment_ms), units.ms_to_samples(chosen.max_segment_ms))
    hidden, _ = model.encode([torch.zeros(max(samples[0], units.RATE_HZ))])
    cross = model.cross_keys_values(hidden)
    assert hidden.dtype == cross.dtype == device.dtype
    shapes = {"hidden": tuple(hidden.shape[1:]), "cross": tuple(cross.shape[1:])}
    identity = EncoderIdentity(
        chosen.name, weights, device.dtype_name, config.quantize, hidden=shapes["hidden"], cross=shapes["cross"]
    )
    longest = max(model.count_frames(samples[1], whole) for whole in (False, True))
    return EncoderFacts(
        identity,
        {carried: prod(shape) * hidden.element_size() for carried, shape in shapes.items()},
        longest,
        samples,
    )


def build_encode_worker(
    model: EncoderDecoderModel,
    device: Device,
    chosen: AsrCard,
    config: EngineConfig,
    meeting: HandshakeSettings,
) -> EncodeWorker:
    """The work of an engine that encodes for others. Raises OptionError."""
    found = measure_encoder(model, device, chosen, config, meeting.weights)
    return EncodeWorker(
        EncodeRunner(model, device), config, found.identity, meeting, found.samples, found.frame_bytes
    )


def build_peer_pool(
    model: EncoderDecoderModel,
    device: Device,
    chosen: AsrCard,
    config: EngineConfig,
    meeting: HandshakeSettings,
    metrics: EngineMetrics | None,
) -> PeerPool | None:
    """Those that encode for this engine; None where it has none. Raises OptionError."""
    if not config.peers:
        return None
    found = measure_encoder(model, device, chosen, config, meeting.weights)
    asks = PeerPoolSettings(
        found.identity,
        meeting.keys,
        config.peer_road,
        config.peer_carries,
        config.peer_timeout_s,
        found.frame_bytes,
        max(config.encode_frames or device.encode_frames, found.longest_frames),
        found.longest_frames,
        found.samples[1],
        metrics,
    )
    return PeerPool(config.peers, asks)
