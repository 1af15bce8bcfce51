"""Every error a caller can meet.

AsrServeError
├── AudioError                what was handed in as audio cannot be transcribed
│   ├── SourceNotFound        no such file, or it may not be read
│   ├── EmptyAudio            no bytes, or no samples
│   ├── NotAudio              the bytes are no container we know, or hold no audio stream
│   ├── UnsupportedAudio      a container or codec we can name but not decode, or an odd array
│   ├── TruncatedAudio        the stream ends before what it announced
│   ├── CorruptAudio          the decoder gave up in the middle
│   ├── AudioTooLong          more seconds than allowed
│   ├── TooFewClips           of somebody's recordings too little can be learnt from
│   └── AudioTooLarge         more bytes than allowed
├── OptionError               an option is unknown or out of range
│   ├── UnknownOption         nothing here has that name
│   ├── MissingOption         one that there must be did not come
│   ├── UnsupportedOption     an option that is known, and that this model or server does not honour
│   ├── UnknownVoice          this model has no voice of that name
│   │   └── NoSuchVoice       no voice of that name was cloned
│   └── TextError             what is to be spoken cannot be
│       ├── EmptyText         there is nothing in it to say
│       ├── TextTooLong       more characters to be spoken than allowed
│       ├── UnsupportedScript letters that no voice here reads
│       ├── MalformedSsml     no XML, or an element or value that is not known; `line` and `column` say where
│       └── UnknownPhoneme    a letter that is not in the voice's alphabet
├── RequestError              the request itself is no good, before anybody listened to its audio
│   ├── MalformedRequest      not what the protocol says
│   │   ├── UnknownCommand    a text that is no command
│   │   ├── OutOfTurn         good in itself, and not at this point
│   │   └── RequestTimeout    it stopped coming
│   │       └── IdleTimeout   nothing came for too long
│   ├── UnsupportedProtocol   one that is known, and not served here
│   ├── InvalidKey            no key, or a wrong one
│   ├── NotAllowed            the key is good, and may not do this
│   ├── NoSuchRoute           nothing answers at that path, or not to that method
│   ├── SessionExpired        the live session is over, or was never there
│   ├── UnknownJob            no cloning of that number, or not any more
│   ├── EventsExpired         it is there, and what its client missed is not kept any more
│   ├── TakenOver             another connection goes on with the session
│   └── ClientGone            nobody waits for the answer any more
├── ModelError
│   ├── UnknownModel          no model of that name
│   ├── ModelNotLoaded        the model is known, and this server has not loaded it
│   ├── WrongModel            the model is loaded, and is of another kind: one that speaks hears nothing
│   ├── WeightsMissing        the model is known, its weights are not on this machine
│   ├── WeightsCorrupt        the bytes are not the ones the card names
│   └── ProgramMissing        a package or program that the model needs is not on this machine
├── ServerError               what a client of ours meets
│   ├── Unreachable           nothing answers there, or not any more
│   └── Refused               the server said no; `code` is its word for why
└── EngineError
    ├── AtCapacity            full; try again after `retry_after_ms`
    │   ├── RateLimited       this caller has had its share for now
    │   └── Draining          the server is going down: try another, or this one when it is back
    ├── Cancelled             the caller took the request back
    ├── StepFailed            our own failure in one step; only the requests in it are lost
    ├── ProgramFailed         a program beside the engine failed, or did not answer in time
    ├── PeerGone              the process at the other end of a ring or a road is gone, or hung up
    ├── PeerRefused           another engine may not work with this one: something of the two differs
    ├── OutOfStep             the ring holds other audio than the one that was announced
    ├── RoadFailed            bytes cannot be carried from one engine to another
    │   ├── RoadTimeout       they were not there in time
    │   └── Torn              what arrived is not what was sent
    ├── DiskFailed            what lay in a file on disk cannot be had, or cannot be put there
    │   └── DiskFull          there is no room for it
    ├── EngineCrashed         one engine process after another died while it worked on this request
    └── EngineClosed          the engine is shutting down or has stopped

Each says what came, what is allowed and what to do, in that order, in one sentence each.
"""

from __future__ import annotations


class AsrServeError(Exception):
    """Root of the tree. `code` is the stable name that goes over the wire."""

    def __init__(self, came: str, allowed: str = "", todo: str = "") -> None:
        self.came, self.allowed, self.todo = came, allowed, todo
        sentences = (part if part.endswith((".", "?")) else f"{part}." for part in (came, allowed, todo) if part)
        super().__init__(" ".join(sentences))

    @property
    def code(self) -> str:
        """`AudioTooLong` -> `audio_too_long`."""
        name = type(self).__name__
        return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.__dict__.copy(), self.args)


def _rebuild(kind: type[AsrServeError], fields: dict[str, object], args: tuple[object, ...]) -> AsrServeError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class AudioError(AsrServeError):
    """What was handed in as audio cannot be transcribed."""


class SourceNotFound(AudioError):
    """No such file, or it may not be read."""


class EmptyAudio(AudioError):
    """No bytes, or no samples."""


class NotAudio(AudioError):
    """The bytes are no container we know, or hold no audio stream."""


class UnsupportedAudio(AudioError):
    """A container or codec we can name but not decode, or an array of the wrong kind."""


class TruncatedAudio(AudioError):
    """The stream ends before what it announced."""


class CorruptAudio(AudioError):
    """The decoder gave up in the middle of the stream."""


class AudioTooLong(AudioError):
    """More seconds than allowed."""


class TooFewClips(AudioError):
    """Of somebody's recordings too little can be learnt from."""


class AudioTooLarge(AudioError):
    """More bytes than allowed."""


class OptionError(AsrServeError):
    """An option is unknown or out of range. `param` names it where it came by name."""

    def __init__(self, came: str, allowed: str = "", todo: str = "", *, param: str | None = None) -> None:
        self.param = param
        super().__init__(came, allowed, todo)


class UnknownOption(OptionError):
    """Nothing here has that name."""


class MissingOption(OptionError):
    """One that there must be did not come."""


class UnsupportedOption(OptionError):
    """An option that is known, and that this model or server does not honour."""


class UnknownVoice(OptionError):
    """This model has no voice of that name."""


class NoSuchVoice(UnknownVoice):
    """No voice of that name was cloned."""


class TextError(OptionError):
    """What is to be spoken cannot be."""


class EmptyText(TextError):
    """There is nothing in it to say."""


class TextTooLong(TextError):
    """More characters to be spoken than allowed."""


class UnsupportedScript(TextError):
    """Letters that no voice here reads."""


class MalformedSsml(TextError):
    """No XML, or an element, attribute or value that is not known. `line` and `column` count from 1."""

    def __init__(self, came: str, allowed: str = "", todo: str = "", *, line: int = 1, column: int = 1) -> None:
        self.line, self.column = line, column
        super().__init__(f"line {line}, column {column}: {came}", allowed, todo, param="input")


class UnknownPhoneme(TextError):
    """A letter that is not in the voice's alphabet."""


class RequestError(AsrServeError):
    """The request itself is no good, before anybody listened to its audio."""


class MalformedRequest(RequestError):
    """Not what the protocol says."""


class UnknownCommand(MalformedRequest):
    """A text that is no command."""


class UnsupportedProtocol(RequestError):
    """A protocol that is known, and not served here: nothing more of it can be answered."""


class OutOfTurn(MalformedRequest):
    """Good in itself, and not at this point."""


class RequestTimeout(MalformedRequest):
    """It stopped coming."""


class IdleTimeout(RequestTimeout):
    """Nothing came for too long."""


class InvalidKey(RequestError):
    """No key, or a wrong one."""


class NotAllowed(RequestError):
    """The key is good, and may not do this."""


class NoSuchRoute(RequestError):
    """Nothing answers at that path, or not to that method."""


class SessionExpired(RequestError):
    """The live session asked for is over, or was never there."""


class UnknownJob(RequestError):
    """No cloning of that number, or not any more."""


class EventsExpired(RequestError):
    """The live session is there, and what its client missed is not kept any more."""


class TakenOver(RequestError):
    """Another connection goes on with the live session."""


class ClientGone(RequestError):
    """Nobody waits for the answer any more."""


class ModelError(AsrServeError):
    """A model or its weights cannot be used."""


class UnknownModel(ModelError):
    """No model of that name."""


class ModelNotLoaded(ModelError):
    """The model is known, and this server has not loaded it."""


class WrongModel(ModelError):
    """The model is loaded, and is of another kind: one that speaks hears nothing, and the other way round."""


class WeightsMissing(ModelError):
    """The model is known, its weights are not on this machine."""


class WeightsCorrupt(ModelError):
    """The bytes found are not the ones the card names."""


class ProgramMissing(ModelError):
    """A package or program that the model needs is not on this machine."""


class ServerError(AsrServeError):
    """What a client of ours meets."""


class Unreachable(ServerError):
    """Nothing answers there, or not any more. `close_code` is the WebSocket's, where one came."""

    def __init__(self, came: str, allowed: str = "", todo: str = "", *, close_code: int | None = None) -> None:
        self.close_code = close_code
        super().__init__(came, allowed, todo)


class Refused(ServerError):
    """The server said no, or failed. `retry_after_ms` says when to try again, where that may help."""

    def __init__(self, message: str, code: str, retry_after_ms: int | None = None) -> None:
        self._code, self.retry_after_ms = code, retry_after_ms
        super().__init__(message)

    @property
    def code(self) -> str:
        """The server's word for why: `at_capacity`, `session_expired`."""
        return self._code


class EngineError(AsrServeError):
    """The engine did not do the work."""


class AtCapacity(EngineError):
    """Full. `retry_after_ms` says when to try again."""

    def __init__(self, came: str, allowed: str, retry_after_ms: int) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__(came, allowed, f"try again in {retry_after_ms} ms")


class RateLimited(AtCapacity):
    """This caller has had its share for now."""


class Draining(AtCapacity):
    """The server is going down: try another, or this one when it is back."""


class Cancelled(EngineError):
    """The caller took the request back."""


class StepFailed(EngineError):
    """Our own failure in one step; only the requests in that step are lost."""


class ProgramFailed(EngineError):
    """A program beside the engine failed, or did not answer in time."""


class PeerGone(EngineError):
    """The process at the other end of a ring or a road is gone, or hung up."""


class PeerRefused(EngineError):
    """Another engine may not work with this one: model, weights, dtype, key or release of the two differ."""


class OutOfStep(EngineError):
    """The ring holds other audio than the one that was announced."""


class RoadFailed(EngineError):
    """Bytes cannot be carried from one engine to another: none such between the two, or a message of no sense."""


class RoadTimeout(RoadFailed):
    """The bytes were not there in time. The road is closed: what comes late must find nothing."""


class Torn(RoadFailed):
    """What arrived is not what was sent: the checksum is another."""


class DiskFailed(EngineError):
    """What lay in a file on disk cannot be had, or cannot be put there."""


class DiskFull(DiskFailed):
    """There is no room for it on that disk."""


class EngineCrashed(EngineError):
    """One engine process after another died while it worked on this request."""


class EngineClosed(EngineError):
    """The engine is shutting down or has stopped."""
