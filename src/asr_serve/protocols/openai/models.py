"""OpenAI's list of models, and the names of OpenAI's own models."""

from __future__ import annotations

from typing import Literal

import msgspec

OPENAI_SPEECH_MODELS = ("tts-1", "gpt-4o-mini-tts")
"""Names of OpenAI's speech models, which versions follow: `tts-1-hd`, `gpt-4o-mini-tts-2025-12-15`."""
OPENAI_RECOGNITION_MODELS = (
    "whisper-1",
    "gpt-4o-transcribe",
    "gpt-4o-mini-transcribe",
    "gpt-realtime",
    "gpt-4o-realtime",
    "gpt-4o-mini-realtime",
    "gpt-live-transcribe",
)
"""Names of OpenAI's recognition models, as above: `gpt-4o-transcribe-diarize`, `gpt-realtime-whisper`."""


def is_openai_speech_model(name: str) -> bool:
    return _names_one_of(name, OPENAI_SPEECH_MODELS)


def is_openai_recognition_model(name: str) -> bool:
    return _names_one_of(name, OPENAI_RECOGNITION_MODELS)


def _names_one_of(name: str, models: tuple[str, ...]) -> bool:
    return name in models or name.startswith(tuple(f"{model}-" for model in models))


class ModelStage(msgspec.Struct, frozen=True):
    """Stage of a pipeline."""

    kind: str
    """recognize, rescore, drop or itn."""
    model: str | None = None
    """Model that recognizes, or language model that rescores."""


class ModelEntry(msgspec.Struct, frozen=True):
    """Model as OpenAI lists it, or pipeline of models, with further properties."""

    id: str
    created: int
    """Start of this server, in Unix seconds."""
    owned_by: str
    state: str
    """State: ready, restarting, failed, loading, unloading or not_loaded."""
    languages: tuple[str, ...]
    parameters: int
    licence: str
    aliases: list[str]
    default: bool = False
    """Whether it answers requests of its kind that name no model."""
    auto: bool = False
    """Whether it serves uploads that name no model in place of the default one, where that one cannot: `auto_model`. It
    is loaded when the first one comes."""
    streaming: bool = False
    """Whether it recognizes audio as it arrives, chunk by chunk; others recognize whole utterances. For a speech
    model: whether audio of a sentence is sent before all of it is made."""
    heads: tuple[str, ...] = ()
    """Decoder heads, ctc, rnnt or tdt, if it has several; the first is used unless the server is configured
    otherwise."""
    chunk_ms: int | None = None
    """Length of a chunk; null for whole utterances."""
    lag_ms: int | None = None
    """Longest delay of a word after its audio; null as above."""
    prompts: bool = False
    """Whether it takes text beside the audio: `prompt`."""
    words: bool = False
    """Whether it gives words with times; characters for Chinese and Japanese."""
    hotwords: bool = False
    """Whether given words can be made more likely: `hotwords`."""
    language_models: tuple[str, ...] = ()
    """Language models that are loaded beside it: `language_model`."""
    speakers: bool = False
    """Whether speakers can be given: `spk`. That takes further models, which are on this machine."""
    itn: tuple[str, ...] = ()
    """Languages with inverse text normalization: `itn`."""
    speaks: bool = False
    """Whether it synthesizes speech; others recognize it."""
    voices: tuple[str, ...] = ()
    """Built-in voices of a speech model."""
    stages: tuple[ModelStage, ...] = ()
    """Stages of a pipeline, which transcribes files; none for a model."""
    revision: str = ""
    """Revision of the weights of a loaded recognition model, as evaluations record it; empty for a pipeline, and for
    weights of the setting `weights`."""
    quantization: str = ""
    """Quantization of a loaded recognition model, `none` where there is none."""
    object: Literal["model"] = "model"


class ModelRenewal(msgspec.Struct, frozen=True):
    """Result of replacing a model's engine process by a new one."""

    id: str
    state: str
    """State, as in ModelEntry."""
    sessions: int
    """Live sessions whose voice activity moved with its state."""
    streams: int
    """Live sessions of a streaming model that moved in the middle of speech, with their state."""
    replayed: int
    """Live sessions of a streaming model replayed from the start of their speech. Clients notice only a pause."""
    repeated: int
    """Requests that the old process did not finish within `drain_s`, and the new one started again."""
    load_s: float
    """Seconds until the new process was ready."""
    total_s: float
    """Seconds until the old one was gone."""
    object: Literal["model.renewal"] = "model.renewal"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelEntry]
    object: Literal["list"] = "list"
