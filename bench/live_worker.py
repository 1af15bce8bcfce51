"""The engine without a server: where clips have speech, and what the callers' audio is when it is heard whole.

python live_worker.py JOB.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import live_speech
import numpy as np
from live_speech import WINDOW_SAMPLES, Caller, Pcm

LEAD_WINDOWS = 64
"""Silence before a clip, as in the middle of a call."""


def voices(clips: Sequence[Pcm], pause: int) -> list[list[float]]:
    """Silero's probability for every window of every clip and the pause after it."""
    import torch

    from asr_serve.models.auxiliary import silero

    counts = [live_speech.windows(len(clip) + pause) for clip in clips]
    sound = np.zeros((len(clips), (LEAD_WINDOWS + max(counts)) * WINDOW_SAMPLES), np.float32)
    for row, clip in enumerate(clips):
        start = LEAD_WINDOWS * WINDOW_SAMPLES
        sound[row, start : start + len(clip)] = clip / 32_768
    model = silero.load()
    live = torch.tensor([LEAD_WINDOWS + count for count in counts])
    found, _ = model.step(torch.from_numpy(sound), model.state(len(clips)), live)
    return [found[row, LEAD_WINDOWS : LEAD_WINDOWS + count].tolist() for row, count in enumerate(counts)]


def offline(clips: Sequence[Pcm], callers: Sequence[Caller], device: str, model: str) -> dict[str, Any]:
    """Every caller's whole audio through the library, as a file would go."""
    import asr_serve
    from asr_serve.config import EngineConfig

    def streams() -> Iterator[Any]:
        for caller in callers:
            yield live_speech.stream(caller, clips).astype(np.float32) / 32_768

    with asr_serve.load(model, device=device, engine=EngineConfig(prefix_bytes=0)) as loaded:
        return {"texts": [transcript.text for transcript in loaded.transcribe(streams())], "facts": loaded.describe()}


def run(job: dict[str, Any]) -> dict[str, Any]:
    clips = live_speech.restore(Path(job["clips"]))
    if job["work"] == "voices":
        return {"probabilities": voices(clips, job["pause"])}
    return offline(clips, [Caller(*caller) for caller in job["callers"]], job["device"], job["model"])


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
