"""Speaker embeddings of a model's own voices, by which a cloned voice starts from the most similar one.

    python -m asr_serve_tools.train.speaker_similarities --speech speech/ --model model/

writes speakers.safetensors beside the checkpoint: `ge2e` (voices, 256), in the order of config.json's voices. A
voice without speech gets zeros, and is similar to none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from asr_serve.audio.resample import resample_clip
from asr_serve.cloning.base_model import SPEAKER_EMBEDDINGS_FILE
from asr_serve.cloning.voice_corpus import FULL_SCALE, RATE_HZ, open_voice_corpora
from asr_serve.errors import AsrServeError
from asr_serve.models.auxiliary import ge2e
from asr_serve.units import RATE_HZ as HEARD_HZ

UTTERANCES = 24
"""Utterances of each voice, of two seconds or more."""
LEAST_SAMPLES = 2 * RATE_HZ


def speaker_similarities(speech: Path, names: list[str]) -> np.ndarray:
    """Speaker embeddings (voices, 256) float32 of `names`. A file belongs to the voice of the name after its last
    underscore. Raises OptionError."""
    encoder, found = ge2e.load(), np.zeros((len(names), ge2e.WIDTH), np.float32)
    for voice in open_voice_corpora(speech):
        name = voice.name.rpartition("_")[2]
        if name not in names:
            continue
        long = (recording.pcm for recording in voice if len(recording.pcm) >= LEAST_SAMPLES)
        clips = [
            resample_clip(pcm.astype(np.float32) / FULL_SCALE, RATE_HZ, HEARD_HZ)
            for pcm in itertools.islice(long, UTTERANCES)
        ]
        if clips:
            found[names.index(name)] = encoder.embed_speaker(clips)
    return found


def write_speaker_similarities(speech: Path, model: Path) -> Path:
    names = list(json.loads((model / "config.json").read_text("utf-8"))["voices"])
    path = model / SPEAKER_EMBEDDINGS_FILE
    save_file({"ge2e": torch.from_numpy(speaker_similarities(speech, names)).half()}, path)
    path.chmod(0o644)  # it ships with the checkpoint
    return path


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speech", type=Path, required=True, help="a folder that asr-serve train voice has filled")
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint's folder")
    options = parser.parse_args(words)
    try:
        print(write_speaker_similarities(options.speech, options.model))
    except (AsrServeError, OSError) as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
