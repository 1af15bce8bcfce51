"""Voices that were cloned: `asr-serve clone` makes them, `asr-serve voices` manages them."""
