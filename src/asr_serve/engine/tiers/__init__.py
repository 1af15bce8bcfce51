"""What lies below the device: memory of the host, then a file. START HERE: tiers."""

from asr_serve.engine.tiers.tiers import Tiers

__all__ = ["Tiers"]
