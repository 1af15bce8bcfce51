"""What was heard and said before, for whoever brings the same again."""

from __future__ import annotations

from asr_serve.engine.cache.tiered_store import TieredStore

__all__ = ["TieredStore"]
