"""Every error that callers can get, as a tree of classes below AsrServeError.

Each message says what came, what is allowed and what to do, in that order, in one sentence each.
"""

from __future__ import annotations

from typing import Self


class AsrServeError(Exception):
    """Root of the tree. `code` is the stable name that clients receive; `param` the name of the option or field that
    is wrong, where there is one."""

    param: str | None = None

    def __init__(self, came: str, allowed: str = "", todo: str = "") -> None:
        self.came, self.allowed, self.todo = came, allowed, todo
        sentences = (part if part.endswith((".", "?")) else f"{part}." for part in (came, allowed, todo) if part)
        super().__init__(" ".join(sentences))

    @property
    def code(self) -> str:
        """Class name in snake case: `AudioTooLong` -> `audio_too_long`."""
        name = type(self).__name__
        return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))

    def located(self, place: str) -> Self:
        """Returns a copy whose message begins with the place of its cause, like a file with a line."""
        error = type(self).__new__(type(self))
        error.__dict__.update(self.__dict__)
        AsrServeError.__init__(error, f"{place}: {self.came}", self.allowed, self.todo)
        return error

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.__dict__.copy(), self.args)


def _rebuild(kind: type[AsrServeError], fields: dict[str, object], args: tuple[object, ...]) -> AsrServeError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class AudioError(AsrServeError):
    """Audio input that cannot be transcribed."""


class SourceNotFound(AudioError):
    """No such file, or no permission to read it."""


class EmptyAudio(AudioError):
    """No bytes, or no samples."""


class NotAudio(AudioError):
    """Bytes that are no known container, or hold no audio stream."""


class UnsupportedAudio(AudioError):
    """A container or codec that is known but cannot be decoded, or an array of the wrong kind."""


class TruncatedAudio(AudioError):
    """The stream ends before its announced length."""


class CorruptAudio(AudioError):
    """The decoder failed in the middle of the stream."""


class AudioTooLong(AudioError):
    """More seconds than allowed."""


class TooFewClips(AudioError):
    """Too few usable recordings to clone a voice."""


class AudioTooLarge(AudioError):
    """More bytes than allowed."""


class OptionError(AsrServeError):
    """An option is unknown or out of range."""

    def __init__(self, came: str, allowed: str = "", todo: str = "", *, param: str | None = None) -> None:
        self.param = param
        super().__init__(came, allowed, todo)


class UnknownOption(OptionError):
    """No option of that name."""


class MissingOption(OptionError):
    """A required option is missing."""


class UnsupportedOption(OptionError):
    """A known option that this model or server does not support."""


class NotMeasured(OptionError):
    """Capacity planning for a machine kind or a model whose service times were not measured."""


class UnknownVoice(OptionError):
    """No voice of that name in this model."""


class NoSuchVoice(UnknownVoice):
    """No cloned voice of that name."""


class TextError(OptionError):
    """Text that cannot be synthesized."""


class EmptyText(TextError):
    """Nothing in the text to speak."""


class TextTooLong(TextError):
    """More characters to speak than allowed."""


class UnsupportedScript(TextError):
    """Letters that no voice here reads."""


class MalformedSsml(TextError):
    """Invalid XML, or an unknown element, attribute or value. `line` and `column` count from 1."""

    def __init__(self, came: str, allowed: str = "", todo: str = "", *, line: int = 1, column: int = 1) -> None:
        self.line, self.column = line, column
        super().__init__(f"line {line}, column {column}: {came}", allowed, todo, param="input")


class UnknownPhoneme(TextError):
    """A symbol that is not in the voice's alphabet."""


class RequestError(AsrServeError):
    """An invalid request, refused before its audio is processed."""


class MalformedRequest(RequestError):
    """A violation of the protocol."""


class UnknownCommand(MalformedRequest):
    """A text that is no command."""


class UnsupportedProtocol(RequestError):
    """A known protocol that is not served here: no further message of it can be answered."""


class OutOfTurn(MalformedRequest):
    """Valid in itself, but not at this point."""


class RequestTimeout(MalformedRequest):
    """The request stopped arriving."""


class IdleTimeout(RequestTimeout):
    """No message for too long."""


class InvalidKey(RequestError):
    """No key, or a wrong one."""


class NotAllowed(RequestError):
    """A valid key without permission for this."""


class NoSuchRoute(RequestError):
    """No route at that path, or not for that method."""


class SessionExpired(RequestError):
    """The requested live session has ended, or never existed."""


class UnknownSession(SessionExpired):
    """No session of that id was ever here."""


class UnknownCall(RequestError):
    """No call over WebRTC of that id, or not any more."""


class UnsupportedMediaType(RequestError):
    """A body of a type that this route does not read."""


class PreconditionRequired(RequestError):
    """A change without the header If-Match, which says of what."""


class PreconditionFailed(RequestError):
    """A change of something that is not there any more."""


class Unprocessable(RequestError):
    """A change that is well-formed, and is not supported."""


class UnknownJob(RequestError):
    """No cloning job of that number, or no longer."""


class UnknownFile(RequestError):
    """No file of that id of this key's, or not any more."""


class UnknownBatch(RequestError):
    """No batch of that id of this key's, or not any more."""


class FileInUse(RequestError):
    """A file that a batch still reads."""


class BatchEnded(RequestError):
    """A change of a batch that has ended."""


class QuotaExceeded(RequestError):
    """More files or bytes than this key, or this server, may keep."""


class EventsExpired(RequestError):
    """The live session exists, but events that its client missed have been dropped."""


class TakenOver(RequestError):
    """Another connection continues the live session."""


class ClientGone(RequestError):
    """The client no longer waits for the response."""


class ModelError(AsrServeError):
    """A model or its weights cannot be used."""


class UnknownModel(ModelError):
    """No model of that name."""

    param = "model"


class ModelNotLoaded(ModelError):
    """A known model that this server has not loaded."""

    param = "model"


class WrongModel(ModelError):
    """A model of another kind: speech synthesis where recognition was requested, or the reverse."""

    param = "model"


class WeightsMissing(ModelError):
    """A known model whose weights are not on this machine."""


class NoCheckpoint(WeightsMissing):
    """A path or a hub repository that was named as a model or as its weights, and holds none."""


class WeightsCorrupt(ModelError):
    """Bytes that differ from those the card names."""


class CacheNotWritable(ModelError):
    """The folder of converted and fetched weights cannot be written."""


class ProgramMissing(ModelError):
    """A package or program that the model needs is not on this machine."""


class GovernanceError(AsrServeError):
    """Models cannot be governed as their policy says."""


class PromotionRefused(GovernanceError):
    """A change of stage that the policy does not allow, or does not allow yet."""


class UnknownRoute(GovernanceError):
    """No route of that name in the policy."""


class AuditLogCorrupt(GovernanceError):
    """An audit log that is not as it was written."""


class AuditLogInUse(GovernanceError):
    """An audit log that another server appends to."""


class EvaluationError(AsrServeError):
    """Evaluations that cannot be shown."""


class NoEvaluations(EvaluationError):
    """A server without a file of evaluations."""


class UnknownEvaluation(EvaluationError):
    """No run of that id, or no such clip in it."""


class ClipAudioMissing(EvaluationError):
    """The recording of a clip is not on this machine."""


class EvaluationsUnreadable(EvaluationError):
    """A file of evaluations that is damaged, or of another version, or may not be read."""


class ServerError(AsrServeError):
    """An error of our own clients."""


class Unreachable(ServerError):
    """No server answers there, or no longer. `close_code` is the WebSocket's, where there was one."""

    def __init__(self, came: str, allowed: str = "", todo: str = "", *, close_code: int | None = None) -> None:
        self.close_code = close_code
        super().__init__(came, allowed, todo)


RETRYABLE_CODES = {"at_capacity", "rate_limited", "draining", "store_unavailable", "model_unavailable", "engine_closed"}
"""Codes of refusals after which another attempt is worthwhile, where no time is told either."""


class Refused(ServerError):
    """The server refused, or failed. `retry_after_ms` says when to try again, where that may help."""

    def __init__(self, message: str, code: str, retry_after_ms: int | None = None) -> None:
        self._code, self.retry_after_ms = code, retry_after_ms
        super().__init__(message)

    @property
    def code(self) -> str:
        """The server's error code: `at_capacity`, `session_expired`."""
        return self._code

    @property
    def is_retryable(self) -> bool:
        """Returns whether another attempt is worthwhile."""
        return self.retry_after_ms is not None or self._code in RETRYABLE_CODES


class EngineError(AsrServeError):
    """The engine could not do the work."""


class AtCapacity(EngineError):
    """Full. `retry_after_ms` says when to try again."""

    def __init__(self, came: str, allowed: str, retry_after_ms: int) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__(came, allowed, f"try again in {retry_after_ms} ms")


class RateLimited(AtCapacity):
    """The client has used its share for now."""


class Draining(AtCapacity):
    """The server is shutting down: try another, or this one when it is back."""


class StoreUnavailable(AtCapacity):
    """The store of live sessions does not answer."""


class ModelUnavailable(AtCapacity):
    """A model could not be loaded, and is not tried again yet."""


class Cancelled(EngineError):
    """The caller cancelled the request."""


class StepFailed(EngineError):
    """An internal failure in one step; only the requests in that step are lost."""


class ProgramFailed(EngineError):
    """A program beside the engine failed, or did not answer in time."""


class StaleBuild(EngineError):
    """A native module that was built from other sources than the Python beside it."""


class RankLost(EngineError):
    """A process of a tensor-parallel engine died, or did not answer in time. The engine ends, with all its ranks."""


class PeerGone(EngineError):
    """The process at the other end of a ring or a transport is gone, or hung up."""


class PeerRefused(EngineError):
    """Another engine that is incompatible with this one: model, weights, dtype, key or release differ."""


class OutOfStep(EngineError):
    """Audio in the ring that differs from what was announced."""


class TransportFailed(EngineError):
    """Bytes cannot be transferred from one engine to another: no common transport, or an invalid message."""


class TransportTimeout(TransportFailed):
    """The bytes did not arrive in time. The transport is closed, so that late bytes are never taken for new ones."""


class ChecksumMismatch(TransportFailed):
    """Bytes that arrived differ from those that were sent: the checksum is wrong."""


class DiskFailed(EngineError):
    """An entry cannot be read from disk, or not be written to it."""


class DiskFull(DiskFailed):
    """No space left on that disk."""


class EngineCrashed(EngineError):
    """Several engine processes in a row died while they worked on this request."""


class EngineClosed(EngineError):
    """The engine is shutting down or has stopped."""
