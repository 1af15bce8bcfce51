"""Which roads there are, and a road by its name: that of its file."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import get_args

from asr_serve.errors import OptionError
from asr_serve.transfer.transports.base import (
    MAX_BUFFER_BYTES,
    Receiver,
    TransportKind,
    TransportSender,
    read_offer,
)
from asr_serve.types import suggest_name


def available_transports() -> tuple[str, ...]:
    """The roads that this installation has, the best first. `local` leads no further than this process."""
    return tuple(kind for kind in get_args(TransportKind) if _load_transport(kind).is_available())


def create_receiver(kind: str, nbytes: int, host: str) -> Receiver:
    """Memory of so many bytes for one sender. `host`: the address at which the other side reaches this one.

    Raises OptionError where that road is not here, or cannot be made with this size or address.
    """
    if kind not in (here := available_transports()):
        raise OptionError(
            f"road {kind!r}", f"what this installation has: {', '.join(here)}", suggest_name(kind, here)
        )
    if not 1 <= nbytes <= MAX_BUFFER_BYTES:
        raise OptionError(f"a landing memory of {nbytes} bytes", f"1 to {MAX_BUFFER_BYTES}")
    landing: Receiver = _load_transport(kind).create_receiver(nbytes, host)
    return landing


def attach_sender(offer: bytes, only_at: str | None = None) -> TransportSender:
    """The sending side of a landing that another process, or this one, offers.

    `only_at`: the address from which the offer came, where that is not trusted to name another: else whoever
    offers chooses whom this machine connects to. Any port of it may be named. Raises RoadFailed where it cannot be
    attached: a road that is not here, another machine's memory or address, nobody there.
    """
    read = read_offer(offer)
    sender: TransportSender = _load_transport(read.kind).attach_sender(read, only_at)
    return sender


def _load_transport(kind: str) -> ModuleType:
    return importlib.import_module(f"asr_serve.transfer.transports.{kind}")
