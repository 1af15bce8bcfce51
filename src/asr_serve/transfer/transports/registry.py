"""Registry of transports by name: that of their file."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import get_args

from asr_serve.errors import OptionError
from asr_serve.transfer.transports.base import MAX_BUFFER_BYTES, Receiver, TransportKind, TransportSender, read_offer
from asr_serve.types import suggest_name


def available_transports() -> tuple[str, ...]:
    """Returns the transports of this installation, the best first. `local` works within this process only."""
    return tuple(kind for kind in get_args(TransportKind) if _load_transport(kind).is_available())


def create_receiver(kind: str, nbytes: int, host: str) -> Receiver:
    """Creates a receiver of `nbytes` for one sender. `host`: the address at which the other side reaches this one.
    Raises OptionError where the transport is not available, or does not work with this size or address."""
    if kind not in (available := available_transports()):
        raise OptionError(
            f"transport {kind!r}", f"what this installation has: {', '.join(available)}", suggest_name(kind, available)
        )
    if not 1 <= nbytes <= MAX_BUFFER_BYTES:
        raise OptionError(f"a landing memory of {nbytes} bytes", f"1 to {MAX_BUFFER_BYTES}")
    receiver: Receiver = _load_transport(kind).create_receiver(nbytes, host)
    return receiver


def attach_sender(offer: bytes, only_at: str | None = None) -> TransportSender:
    """Attaches a sender to a receiver that another process, or this one, offers.

    `only_at`: the only address that an untrusted offer may name, that of its origin: else the offer chooses the machine
    that this one connects to. Any port of it may be named. Raises TransportFailed where attaching fails: an unavailable
    transport, another machine's memory or address, no peer there."""
    parsed = read_offer(offer)
    sender: TransportSender = _load_transport(parsed.kind).attach_sender(parsed, only_at)
    return sender


def _load_transport(kind: str) -> ModuleType:
    return importlib.import_module(f"asr_serve.transfer.transports.{kind}")
