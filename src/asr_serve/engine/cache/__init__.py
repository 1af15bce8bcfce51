"""Page pool, prefix cache, and the tiered store that offloads to host memory and disk."""

from __future__ import annotations

from asr_serve.engine.cache.tiered_store import TieredStore

__all__ = ["TieredStore"]
