"""Message classes of Riva's services. They are in a descriptor pool of their own: a program that loads this package
beside Riva's client has the client's classes too, of the same names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from asr_serve.errors import MalformedRequest, OptionError
from asr_serve.protocols.ignored_fields import refuse_or_ignore
from asr_serve.protocols.riva.methods import DESCRIPTORS

MAX_OPTIONS_BYTES = 4 << 20
"""Limit of a message without its audio."""


def _load() -> DescriptorPool:
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:  # each behind those that it imports
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = _load()


def _message_class(name: str) -> Any:
    return GetMessageClass(POOL.FindMessageTypeByName(f"nvidia.riva.{name}"))


RecognizeRequest = _message_class("asr.RecognizeRequest")
RecognizeResponse = _message_class("asr.RecognizeResponse")
StreamingRecognizeRequest = _message_class("asr.StreamingRecognizeRequest")
StreamingRecognizeResponse = _message_class("asr.StreamingRecognizeResponse")
RecognitionConfigRequest = _message_class("asr.RivaSpeechRecognitionConfigRequest")
RecognitionConfigResponse = _message_class("asr.RivaSpeechRecognitionConfigResponse")
SynthesizeSpeechRequest = _message_class("tts.SynthesizeSpeechRequest")
SynthesizeSpeechResponse = _message_class("tts.SynthesizeSpeechResponse")
SynthesisConfigRequest = _message_class("tts.RivaSynthesisConfigRequest")
SynthesisConfigResponse = _message_class("tts.RivaSynthesisConfigResponse")


def parse_message(message_class: Any, data: bytes, audio_field: str | None = None) -> Any:
    """Parses a message. `audio_field`: the field that may be large. Raises MalformedRequest, and OptionError for a
    field that nobody knows, where such are not ignored."""
    name = message_class.DESCRIPTOR.name
    try:
        message = message_class.FromString(data)
    except DecodeError:
        raise MalformedRequest(
            f"{len(data)} bytes came that are no {name}",
            "a message of that type, as Riva's clients encode it",
            "look at the method that was called",
        ) from None
    options_bytes = len(data) - (len(getattr(message, audio_field)) if audio_field else 0)
    if options_bytes > MAX_OPTIONS_BYTES:
        raise MalformedRequest(
            f"a {name} of {options_bytes} bytes without its audio came", f"up to {MAX_OPTIONS_BYTES}", "send less text"
        )
    for field in _unknown_fields(message):
        refuse_or_ignore(field, (), field, partial(_unknown_field, field))
    return message


def _unknown_field(field: str) -> OptionError:
    return OptionError(f"unknown field {field}", "fields that Riva's client 2.28 has", "leave it out", param=field)


def _unknown_fields(message: Message) -> Iterator[str]:
    """Yields the message and the number of each field that is not declared, like `RecognitionConfig.26`."""
    for unknown in UnknownFieldSet(message):
        yield f"{message.DESCRIPTOR.name}.{unknown.field_number}"
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in [value] if isinstance(value, Message) else value:
            yield from _unknown_fields(inner)
