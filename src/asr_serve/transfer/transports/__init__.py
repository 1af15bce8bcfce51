"""Transports of bytes between engines: `base` defines the interface, and each transport is a file of its name."""

from __future__ import annotations

from asr_serve.transfer.transports.base import BufferRegion, Receiver, TransportSender
from asr_serve.transfer.transports.registry import attach_sender, available_transports, create_receiver

__all__ = ["BufferRegion", "Receiver", "TransportSender", "attach_sender", "available_transports", "create_receiver"]
