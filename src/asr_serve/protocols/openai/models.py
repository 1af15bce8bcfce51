"""OpenAI's list of models."""

from __future__ import annotations

from typing import Literal

import msgspec


class ModelEntry(msgspec.Struct, frozen=True):
    """A model as OpenAI lists it, and what else is known of it."""

    id: str
    created: int
    """Unix seconds: when this server learnt of it."""
    owned_by: str
    state: str
    """ready, restarting, failed, loading, unloading or not_loaded."""
    languages: tuple[str, ...]
    parameters: int
    licence: str
    aliases: list[str]
    streaming: bool = False
    """It hears audio as it comes, a chunk at a time, and remembers; others hear an utterance as a whole. Of one
    that speaks: a sentence sounds before all of it is made."""
    heads: tuple[str, ...] = ()
    """How what it has heard may be read, ctc, rnnt or tdt, where it has a choice; the first unless the server was
    told otherwise."""
    chunk_ms: int | None = None
    """What it hears at a time; null where that is an utterance."""
    lag_ms: int | None = None
    """How much later than the audio a word can be known, at most; null as above."""
    prompts: bool = False
    """It reads text beside the audio: `prompt`."""
    words: bool = False
    """It tells words and their times; of Chinese and Japanese, characters."""
    hotwords: bool = False
    """Words that may come can be made likelier: `hotwords`."""
    speakers: bool = False
    """Who speaks can be told: `spk`. That takes models beside this one, which are on this machine."""
    itn: tuple[str, ...] = ()
    """Languages in which numbers can be written as one writes them: `itn`."""
    speaks: bool = False
    """It speaks, and hears nothing; others hear."""
    voices: tuple[str, ...] = ()
    """Of one that speaks, those of its own."""
    object: Literal["model"] = "model"


class ModelRenewal(msgspec.Struct, frozen=True):
    """What became of a model's engine process that another took the place of."""

    id: str
    state: str
    """As of a ModelEntry."""
    sessions: int
    """Callers whose voice activity went over, from where it stood."""
    streams: int
    """Of a model that hears audio as it comes: callers that went over in the middle of what they said."""
    replayed: int
    """The same that had to be heard again, from where they began to speak. They notice nothing but a pause."""
    repeated: int
    """Requests that the old process did not finish within `drain_s`, and the new one began again."""
    load_s: float
    """Until the new process was ready."""
    total_s: float
    """Until the old one was gone."""
    object: Literal["model.renewal"] = "model.renewal"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelEntry]
    object: Literal["list"] = "list"
