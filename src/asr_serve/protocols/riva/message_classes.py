"""Message classes of Riva's services. They are in a descriptor pool of their own: a program that loads this package
beside Riva's client has the client's classes too, of the same names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from asr_serve.errors import MalformedRequest, OptionError
from asr_serve.protocols.ignored_fields import refuse_or_ignore
from asr_serve.protocols.riva.methods import DESCRIPTORS

MAX_OPTIONS_BYTES = 256 << 10
"""Limit of a message without its audio."""
MAX_LIVE_OPTIONS_BYTES = 64 << 10
"""The same of a message of live audio, which the event loop parses."""
MAX_FIELDS = 256
"""Limit of the fields of a message that is larger than such a limit. Clients send a few."""
MAX_LIST_MESSAGES = 1_000
"""Limit of the messages in a list of a message."""
MAX_UNKNOWN_FIELDS = 64
"""Unknown fields of a message that are looked at."""


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


def parse_message(
    message_class: Any, data: bytes, audio_field: str | None = None, max_options_bytes: int = MAX_OPTIONS_BYTES
) -> Any:
    """Parses a message, in a time that its limits bound.

    Args:
        audio_field: the field that may be large
        max_options_bytes: limit of all others together
    Raises: MalformedRequest; OptionError for a field that nobody knows, where such are not ignored.
    """
    descriptor = message_class.DESCRIPTOR
    try:
        if len(data) > max_options_bytes:
            _check_options_bytes(descriptor, data, audio_field, max_options_bytes)
        message = message_class.FromString(data)
    except DecodeError:
        raise MalformedRequest(
            f"{len(data)} bytes came that are no {descriptor.name}",
            "a message of that type, as Riva's clients encode it",
            "look at the method that was called",
        ) from None
    for field in islice(_unknown_fields(message), MAX_UNKNOWN_FIELDS):
        refuse_or_ignore(field, (), field, partial(_unknown_field, field))
    return message


def _check_options_bytes(descriptor: Any, data: bytes, audio_field: str | None, max_options_bytes: int) -> None:
    """Checks the sizes of a large message's fields before anything is built of them: millions of small messages fit
    in it. Raises MalformedRequest, DecodeError."""
    audio_number = descriptor.fields_by_name[audio_field].number if audio_field else None
    sizes = dict[int, int]()
    for count, (number, size) in enumerate(_field_sizes(data), 1):
        if count > MAX_FIELDS:
            raise MalformedRequest(
                f"a {descriptor.name} of {len(data)} bytes with more than {MAX_FIELDS} fields came",
                f"up to {MAX_FIELDS} fields in one of more than {max_options_bytes} bytes",
                "send each field once",
            )
        if number != audio_number:
            sizes[number] = sizes.get(number, 0) + size
    if (options_bytes := sum(sizes.values())) > max_options_bytes:
        number, size = max(sizes.items(), key=lambda item: item[1])
        known = descriptor.fields_by_number.get(number)
        largest = f"field {number}" if known is None else known.name
        without = " without its audio" if audio_field else ""
        raise MalformedRequest(
            f"a {descriptor.name} of {options_bytes} bytes{without} came, {size} of them in {largest}",
            f"up to {max_options_bytes} bytes{without}",
            f"send less in {largest}",
        )


def _field_sizes(data: bytes) -> Iterator[tuple[int, int]]:
    """Yields the number of each field of a message, and the bytes of its value. Raises DecodeError.

    Source  protobuf.dev, Encoding
    """
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        match tag & 7:
            case 0:  # a varint
                size = _read_varint(data, at)[1] - at
            case 1:
                size = 8
            case 2:  # bytes behind their length
                size, at = _read_varint(data, at)
            case 5:
                size = 4
            case _:
                raise DecodeError("a group, which no message of Riva's has")
        at += size
        if at > len(data):
            raise DecodeError("it is cut off")
        yield tag >> 3, size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Number at a position, and the position behind it. Raises DecodeError."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise DecodeError("it is cut off")
        byte = data[at]
        number, at = number | (byte & 0x7F) << shift, at + 1
        if byte < 0x80:
            return number, at
    raise DecodeError("a number has more than ten bytes")


def _unknown_field(field: str) -> OptionError:
    return OptionError(f"unknown field {field}", "fields that Riva's client 2.28 has", "leave it out", param=field)


def _unknown_fields(message: Message) -> Iterator[str]:
    """Yields the message and the number of each field that is not declared, like `RecognitionConfig.26`. Of a list
    only the first MAX_LIST_MESSAGES are looked at."""
    for unknown in UnknownFieldSet(message):
        yield f"{message.DESCRIPTOR.name}.{unknown.field_number}"
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in [value] if isinstance(value, Message) else islice(value, MAX_LIST_MESSAGES):
            yield from _unknown_fields(inner)
