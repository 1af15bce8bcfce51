"""Bytes from one engine to another: base says how, and each road is a file of its name."""

from __future__ import annotations

from asr_serve.transfer.roads.base import Landing, Sender, Spot
from asr_serve.transfer.roads.choosing import attach, kinds, land

__all__ = ["Landing", "Sender", "Spot", "attach", "kinds", "land"]
