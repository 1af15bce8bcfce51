"""FunASR's WebSockets: frames to commands and samples, segments to answers. No sockets here.

Source  FunASR's vLLM guide, sections 5.5 (`/ws`: the answer after STOP) and 6.3 (text while somebody speaks)
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from asr_serve import units
from asr_serve.errors import UnknownCommand
from asr_serve.protocols.fields import shown, words
from asr_serve.text import languages
from asr_serve.types import Segment
from asr_serve.values import nearest

COMMANDS = ("START", "STOP", "LANGUAGE:", "HOTWORDS:")
LONGEST_CHARACTERS = 65_536
"""Of a text frame: some thousand hotwords."""

STARTED = '{"event":"started"}'
STOPPED = '{"event":"stopped"}'
NOT_USED = "They are not used: this model hears audio only. A Whisper can be told which words to expect."
NOT_YET = "They are used from the next START on: this session is heard as it began."


class Start(msgspec.Struct, frozen=True):
    """A session begins."""


class Stop(msgspec.Struct, frozen=True):
    """No more audio will come: finish the text."""


class Language(msgspec.Struct, frozen=True):
    name: str
    """As it was sent."""
    code: str | None
    """None: the model's own."""


class Hotwords(msgspec.Struct, frozen=True):
    words: tuple[str, ...]


Command = Start | Stop | Language | Hotwords


def command(text: str) -> Command:
    """Read a text frame. Raises UnknownCommand.

    >>> command("START"), command("LANGUAGE:English"), command("HOTWORDS:Ada, Babbage,")
    (Start(), Language(name='English', code='en'), Hotwords(words=('Ada', 'Babbage')))
    """
    if len(text) > LONGEST_CHARACTERS:
        raise UnknownCommand(
            f"a text of {len(text)} characters came",
            f"commands are up to {LONGEST_CHARACTERS} characters long",
            "send audio in binary frames",
        )
    name, colon, value = text.strip().partition(":")
    match name + colon:
        case "START":
            return Start()
        case "STOP":
            return Stop()
        case "LANGUAGE:":
            named = value.strip()
            automatic = named.casefold() in ("", "auto", "none", "null")
            return Language(named, None if automatic else languages.code(named))
        case "HOTWORDS:":
            return Hotwords(words(value))
    raise UnknownCommand(
        f"the text {shown(text)} is no command",
        f"commands: {', '.join(COMMANDS)}",
        nearest((name + colon).upper(), COMMANDS),
    )


def language_set(name: str) -> str:
    return _json({"event": "language_set", "language": name or "auto"})


def hotwords_set(words: Iterable[str], why: str = "") -> str:
    """`why` they are not used is said, so that nobody waits for an effect; empty: they are."""
    told = {"message": why} if why else {}
    return _json({"event": "hotwords_set", "hotwords": list(words), "used": not why, **told})


def error(code: str, message: str, retry_after_ms: int | None = None) -> str:
    """Something was refused. What `message` says: what came, what is allowed, what to do."""
    told: dict[str, object] = {"event": "error", "code": code, "message": message}
    if retry_after_ms is not None:
        told["retry_after_ms"] = retry_after_ms
    return _json(told)


class Sentences:
    """The locked sentences of one session, each made JSON once. Times are milliseconds since START."""

    def __init__(self, *, only_new: bool = False) -> None:
        """`only_new`: an answer has those that were locked since the one before it, instead of all."""
        self._only_new = only_new
        self._locked = ""

    def lock(self, segment: Segment) -> None:
        one = _json(
            {
                "text": segment.text,
                "start": units.samples_to_ms(segment.start_samples),
                "end": units.samples_to_ms(segment.end_samples),
            }
        )
        self._locked = f"{self._locked},{one}" if self._locked else one

    def answer(self, partial: str, start_samples: int = 0) -> str:
        """While somebody speaks. `start_samples`: where the partial begins, which FunASR's own clients show."""
        began = f',"partial_start_ms":{units.samples_to_ms(start_samples)}' if partial else ""
        return f'{{"sentences":[{self._take()}],"partial":{_json(partial)}{began},"is_final":false}}'

    def final(self, duration_samples: int | None = None) -> str:
        """After STOP; with the audio's length, as `/ws` tells it."""
        length = "" if duration_samples is None else f',"duration_ms":{units.samples_to_ms(duration_samples)}'
        return f'{{"sentences":[{self._take()}],"is_final":true{length}}}'

    def _take(self) -> str:
        taken = self._locked
        if self._only_new:
            self._locked = ""
        return taken


def _json(what: object) -> str:
    return msgspec.json.encode(what).decode()
