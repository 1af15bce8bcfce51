"""Defaults of FunASR's sockets: language and hotwords of sessions that send none."""

from __future__ import annotations

import contextlib
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec

from asr_serve.config import ServeConfig
from asr_serve.errors import OptionError
from asr_serve.pipelines.prompting import hotword_bias, normalizes_text
from asr_serve.pipelines.segments import SegmentNormalizer, check_diarization, resolve_language
from asr_serve.protocols.funasr.websocket import FunAsrOptions
from asr_serve.server.engine_registry import ModelEngine
from asr_serve.text.languages import requested_language_code

SETTINGS = {"language": "funasr_language", "hotwords": "funasr_hotwords_file"}
"""Fields of FunAsrOptions that have a default -> the setting that it comes from."""


class FunAsrSessionDefaults:
    """Defaults of one server, read when it starts; they are checked once for each model. Belongs to the event loop's
    thread."""

    def __init__(self, config: ServeConfig) -> None:
        """Reads the file of hotwords. Raises OptionError where it cannot be read."""
        self._settings = {name: getattr(config, setting) for name, setting in SETTINGS.items()}
        file = config.funasr_hotwords_file
        options = FunAsrOptions(
            language=requested_language_code(config.funasr_language),
            hotwords=() if file is None else read_hotwords(file),
        )
        self._fields = {name: value for name in SETTINGS if (value := getattr(options, name))}
        self._accepted: WeakKeyDictionary[ModelEngine, dict[bool | None, FunAsrOptions]] = WeakKeyDictionary()
        """Options of a session that sends none, by its engine and its `itn`, which not every language has."""

    @property
    def empty(self) -> bool:
        """Returns whether there are none, as for a server that recognizes nothing."""
        return not self._fields

    def check(self, engine: ModelEngine) -> None:
        """Raises OptionError for defaults that a model does not take."""
        for name, value in self._fields.items():
            try:
                validate_options(engine, FunAsrOptions(**{name: value}))
            except OptionError as error:
                raise error.located(f"{SETTINGS[name]}={self._settings[name]}") from None

    def apply(self, engine: ModelEngine, options: FunAsrOptions) -> FunAsrOptions:
        """Options of a socket with those defaults that its model takes: another than the server's own need not."""
        by_itn = self._accepted.setdefault(engine, {})
        if options.itn not in by_itn:
            accepted = FunAsrOptions(itn=options.itn)
            for name, value in self._fields.items():
                changed = msgspec.structs.replace(accepted, **{name: value})
                with contextlib.suppress(OptionError):
                    validate_options(engine, changed)
                    accepted = changed
            by_itn[options.itn] = accepted
        accepted = by_itn[options.itn]
        return msgspec.structs.replace(options, language=accepted.language, hotwords=accepted.hotwords)


def validate_options(engine: ModelEngine, options: FunAsrOptions) -> None:
    """Raises OptionError for options that the model or the server does not support."""
    hotword_bias(engine.client, engine.tokenizer, options.hotwords)
    SegmentNormalizer(
        resolve_language(engine.client, options.language or None), itn=normalizes_text(engine.client.card, options.itn)
    )
    if options.spk:
        check_diarization(engine.client)


def read_hotwords(file: str) -> tuple[str, ...]:
    """Hotwords of a file, one per line. Raises OptionError."""
    try:
        lines = Path(file).expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        came = f"funasr_hotwords_file={file!r}: {why}"
        raise OptionError(came, "a file with a hotword on each line", param="funasr_hotwords_file") from None
    return tuple(word for line in lines if (word := line.strip()))
