"""Offline tools around asr-serve: evaluation, labels, training."""
