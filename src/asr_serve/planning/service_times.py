"""Service times of one machine kind: what each step of each model costs there, as `bench/service_times.py` measured.

A step that takes `rows` rows and `audio_s` seconds of audio together takes `fixed_s + row_s * rows + audio_factor *
audio_s` seconds. Tables of machine kinds are JSON files in `machines`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from asr_serve.errors import NotMeasured, OptionError, SourceNotFound
from asr_serve.types import suggest_name

MACHINES = Path(__file__).parent / "machines"
"""Folder of the tables that come with this package."""
MAX_FILE_BYTES = 1 << 20
HOW_TO_MEASURE = (
    "measure it there with `python bench/service_times.py --data DIR --machine NAME --output FILE`, and name the file "
    "with --service-times (docs/planning.md)"
)

Seconds = Annotated[float, Meta(ge=0, le=3_600)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]


class StepCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost of one step, a least-squares fit."""

    fixed_s: Seconds = 0.0
    row_s: Seconds = 0.0
    audio_factor: Seconds = 0.0
    """Seconds per second of audio in the step."""
    residual: Annotated[float, Meta(ge=0)] = 0.0
    """Root mean square of the fit's relative errors."""
    samples: Annotated[int, Meta(ge=0)] = 0
    """Kinds of steps (rows, audio) that the fit is through."""

    def seconds(self, rows: float, audio_s: float = 0.0) -> float:
        return self.fixed_s + self.row_s * rows + self.audio_factor * audio_s


class StreamingModelTimes(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="streaming", kw_only=True
):
    """Model that steps a chunk of many sessions."""

    chunk: StepCost
    chunk_s: Annotated[float, Meta(gt=0, le=10)]
    """Audio in a chunk of a live caller."""
    lag_s: Seconds
    """Audio after a chunk that its step has to see."""
    wait_s: Seconds
    """Time that a ready session waits for others."""
    max_rows: Count
    """Sessions in a step; 1: one after another."""
    bulk_s: Annotated[float, Meta(gt=0, le=60)]
    """Audio in a step of a file while no caller is live."""


class UtteranceModelTimes(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="utterance", kw_only=True
):
    """Encoder-decoder model: utterances are encoded in batches, and decoded a token of every row at a time."""

    encode: StepCost
    verify: StepCost
    """Pass over draft tokens and prompts; its rows are token positions."""
    decode: StepCost
    tokens_per_s: Annotated[float, Meta(ge=0, le=1_000)]
    """Tokens for each second of speech."""
    tokens_fixed: Annotated[float, Meta(ge=0, le=1_000)] = 0.0
    accepted: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of draft tokens that the model accepts."""
    max_rows: Count = 64
    encode_audio_s: Annotated[float, Meta(gt=0, le=1 << 20)] = 60.0
    """Most audio in an encode batch, padding included."""
    packed: bool = False
    """Whether an utterance of an encode batch takes its own audio, as on a CPU; False: as much as the longest."""
    handover: StepCost = StepCost()
    """Transfer of one encoder result to a decode replica."""


class SpeechModelTimes(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="speech", kw_only=True
):
    """Voice model: a sentence, from its text to its last sample."""

    speak: StepCost


ModelTimes = StreamingModelTimes | UtteranceModelTimes | SpeechModelTimes


class ServerTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Processor time of a replica outside its model's steps."""

    live_packet_s: Seconds
    """Server and voice activity, for each packet of a live caller."""
    file_s: Seconds
    """Server, for each file."""
    file_audio_factor: Seconds
    """Server and voice activity, for each second of a file."""
    packet_s: Annotated[float, Meta(gt=0, le=10)] = 0.1
    """Audio in a packet."""
    live_path_s: Seconds = 0.0
    """Time from a live caller's packet to the final that it decides, with nobody else on the server."""


class ServiceTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Table of one machine kind."""

    machine: str
    description: str
    cores: Count
    cores_per_replica: Count
    """Cores that one replica had when it was measured."""
    server: ServerTimes
    models: dict[str, ModelTimes]
    gpus: Annotated[int, Meta(ge=0, le=1_024)] = 0
    gpus_per_replica: Annotated[int, Meta(ge=0, le=1_024)] = 0
    price_per_hour: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Price of one machine; see `price_source`."""
    price_source: str = ""
    measured: str = ""
    """Date and conditions of the measurement."""

    @property
    def replicas_per_machine(self) -> int:
        by_cores = max(1, self.cores // self.cores_per_replica)
        return min(by_cores, max(1, self.gpus // self.gpus_per_replica)) if self.gpus_per_replica else by_cores

    def model(self, name: str) -> ModelTimes:
        """Returns a model's times. Raises NotMeasured."""
        if name not in self.models:
            raise NotMeasured(
                f"the model {name} is not measured on {self.machine}",
                f"measured are {', '.join(self.models) or 'none'}",
                f"{suggest_name(name, list(self.models))}; {HOW_TO_MEASURE}".removeprefix("; "),
                param="model",
            )
        return self.models[name]


def machine_kinds() -> list[str]:
    """Names of the machine kinds that were measured."""
    return sorted(path.stem for path in MACHINES.glob("*.json"))


def service_times(machine: str) -> ServiceTimes:
    """Returns the table of a machine kind. Raises NotMeasured."""
    kinds = machine_kinds()
    if machine not in kinds:
        raise NotMeasured(
            f"the machine kind {machine} is not measured",
            f"measured are {', '.join(kinds) or 'none'}; no GPU is among them",
            f"{suggest_name(machine, kinds)}; {HOW_TO_MEASURE}".removeprefix("; "),
            param="machine",
        )
    return read_service_times(MACHINES / f"{machine}.json")


def read_service_times(path: Path) -> ServiceTimes:
    """Reads a table that `bench/service_times.py` wrote. Raises SourceNotFound, OptionError with the key."""
    try:
        data = path.read_bytes()
    except OSError as failure:
        raise SourceNotFound(f"the service times {path} cannot be read: {failure}") from failure
    if len(data) > MAX_FILE_BYTES:
        raise OptionError(f"service times of {len(data)} bytes: {path}", f"up to {MAX_FILE_BYTES}", param="machine")
    try:
        return msgspec.json.decode(data, type=ServiceTimes)
    except msgspec.DecodeError as failure:
        message, _, key = str(failure).partition(" - at `$.")
        place = f"{path}, {key.rstrip('`')}" if key else str(path)
        raise OptionError(
            f"{place}: {message}", "a table that bench/service_times.py wrote", param="service_times"
        ) from failure
