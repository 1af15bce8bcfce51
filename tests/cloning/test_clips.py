"""What recordings are good for, and what is said of those that are not."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np
import pytest
from spoken_by_heart import spoken

from asr_serve.audio.input_manifest import InputItem, expand_inputs
from asr_serve.audio.reader import read_audio
from asr_serve.audio.resample import resample_clip
from asr_serve.cloning import clips, training_material
from asr_serve.cloning.clips import CloningClip, RecognizedClipSpan
from asr_serve.cloning.cloning_recognizer import CloningRecognizer, TextPhonemizer
from asr_serve.cloning.voice_corpus import HOP, RATE_HZ
from asr_serve.errors import AsrServeError, MalformedRequest, OptionError, TooFewClips
from asr_serve.models.auxiliary import ge2e
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import tts_card
from asr_serve.voices.cloning_messages import ClipReport


@pytest.fixture(scope="module")
def voice(packaged_speech: Path) -> np.ndarray:
    """44 s of one speaker at 22.05 kHz."""
    return resample_clip(read_audio(packaged_speech / "two_cities.wav"), 16_000, RATE_HZ)


@pytest.fixture(scope="module")
def clip(voice: np.ndarray) -> np.ndarray:
    return voice[RATE_HZ // 4 : 6 * RATE_HZ]


def wav(pcm: np.ndarray, rate_hz: int = RATE_HZ) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setparams((1, 2, rate_hz, 0, "NONE", ""))
        file.writeframes((pcm * 32_767).clip(-32_768, 32_767).astype(np.int16).tobytes())
    return made.getvalue()


def said(text: str) -> clips.ClipRecognizer:
    return lambda pcm: [RecognizedClipSpan(0, len(pcm), text)] if text else []


def of(pcm: np.ndarray, text: str | None = "some words", heard: str = "some words") -> list[CloningClip | ClipReport]:
    return list(clips.split_recording(InputItem("a.wav", wav(pcm)), text, said(heard)))


def wrong(pcm: np.ndarray, **more: str) -> str:
    (found,) = of(pcm, **more)
    assert isinstance(found, ClipReport)
    assert found.clip == "a.wav"
    return found.left_out


def test_a_good_clip(clip):
    (found,) = of(clip)
    assert isinstance(found, CloningClip)
    assert len(found.pcm) % HOP == 0
    assert found.is_transcribed
    assert 4 < len(found.pcm) / RATE_HZ < 6.1


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 44_100, 48_000])
def test_any_rate(clip, rate_hz):
    made = resample_clip(clip, RATE_HZ, rate_hz)
    found = clips.read_clip(wav(made, rate_hz))
    assert abs(len(found) - len(clip)) <= 4
    one, other = (np.abs(np.fft.rfft(each, 1 << 17))[:15_000] for each in (found, clip))  # up to 2.5 kHz
    assert np.corrcoef(one, other)[0, 1] > 0.99


def test_silence_at_the_ends_is_cut(clip):
    still = np.zeros(2 * RATE_HZ, np.float32)
    (plain,), (padded,) = of(clip), of(np.concatenate([still, clip, still]))
    assert isinstance(plain, CloningClip)
    assert isinstance(padded, CloningClip)
    assert abs(len(plain.pcm) - len(padded.pcm)) < 0.1 * RATE_HZ
    kept = round(clips.EDGE_SILENCE_S * RATE_HZ) // 2
    assert np.abs(padded.pcm[:kept]).max() < 0.05 * np.abs(padded.pcm).max()


def test_each_fault_is_named(clip, rng):
    assert "s of speech" in wrong(clip[RATE_HZ : int(1.5 * RATE_HZ)])
    assert "0.1 s" in wrong(clip[: int(0.1 * RATE_HZ)])
    assert "longer than" in wrong(np.tile(clip, 5))
    assert "faint" in wrong(0.002 * clip)
    assert "clipped" in wrong((8 * clip / np.abs(clip).max()).clip(-1, 1))
    assert "noisy" in wrong(clip + 0.1 * rng.standard_normal(len(clip)).astype(np.float32))
    assert "faint" in wrong(np.zeros_like(clip))
    assert "no words" in wrong(clip, text="...", heard="...")
    assert "words differ" in wrong(clip, text="something else was to be read", heard="it was the best of times")


def test_quiet_and_loud_are_both_good(clip):
    top = float(np.abs(clip).max())
    for gain in (0.03 / top, 0.95 / top):
        (found,) = of(gain * clip)
        assert isinstance(found, CloningClip), found


def test_what_is_no_audio_is_named_and_left_out():
    (found,) = clips.split_recording(InputItem("b.wav", b"RIFF and nothing else"), None, said("x"))
    assert isinstance(found, ClipReport)
    assert found.left_out


def test_a_long_recording_is_cut_at_its_segments(voice):
    parts = [
        RecognizedClipSpan(0, 5 * 16_000, "one"),
        RecognizedClipSpan(6 * 16_000, 9 * 16_000, "two"),
        RecognizedClipSpan(9 * 16_000, 9 * 16_000 + 900, "x"),
    ]
    found = list(clips.split_recording(InputItem("a.wav", wav(voice[: 12 * RATE_HZ])), None, lambda pcm: parts))
    assert [each.key for each in found if isinstance(each, CloningClip)] == ["a.wav#1", "a.wav#2"]
    assert [each.text for each in found] == ["one", "two", "x"]
    assert isinstance(found[2], ClipReport)


def test_a_recording_without_words(clip):
    assert "no speech" in wrong(clip, text=None, heard="")  # type: ignore[arg-type]


def test_a_text_beside_a_recording(tmp_path):
    (tmp_path / "a.lab").write_text("BESIDE IT IS A TEXT\n")
    (tmp_path / "b.txt").write_text("Of b.")
    assert clips.transcript_of(str(tmp_path / "a.wav"), {}) == "Beside it is a text"
    assert clips.transcript_of(str(tmp_path / "b.wav"), {}) == "Of b."
    assert clips.transcript_of(str(tmp_path / "b.wav"), {"b": "By name."}) == "By name."
    assert clips.transcript_of(str(tmp_path / "c.wav"), {}) is None
    (tmp_path / "d.txt").write_bytes(b"caf\xe9")
    with pytest.raises(MalformedRequest, match=r"d\.txt is not UTF-8"):
        clips.transcript_of(str(tmp_path / "d.wav"), {})
    assert clips.spoken_case("NASA OK") == "NASA OK"


@pytest.mark.parametrize(
    ("text", "heard", "share"),
    [
        ("one two", "One, two!", 0),
        ("one two", "one", 0.5),
        ("one", "one two three", 2),
        ("don't", "dont", 0),
        ("", "x", 1),
    ],
)
def test_the_share_of_words_that_differ(text, heard, share):
    assert clips.word_error_share(text, heard) == share


@pytest.fixture(scope="module")
def encoder() -> ge2e.Ge2eEncoder:
    if store.published_folder(ge2e.CARDS[0]) is None:
        pytest.skip("resemblyzer is not installed: pip install --no-deps resemblyzer==0.1.4")
    return ge2e.load()


def cut(voice: np.ndarray, seconds: float = 6.0) -> list[np.ndarray]:
    size = int(seconds * RATE_HZ)
    return [voice[at : at + size] for at in range(0, len(voice) - size, size)]


@pytest.fixture(scope="module")
def other() -> np.ndarray:
    return np.concatenate([known.pcm for known in spoken()])


def test_clips_of_another_voice_are_left_out(voice, other, encoder):
    other = other[: 6 * RATE_HZ]
    items = [InputItem(f"{number}.wav", wav(part)) for number, part in enumerate([*cut(voice), other])]
    shares: list[float] = []
    found = training_material.gather_material(items, {}, said("words that are said"), encoder, shares.append)
    out = [verdict for verdict in found.verdicts if verdict.left_out]
    assert [verdict.clip for verdict in out] == [items[-1].key]
    assert "another voice" in out[0].left_out
    assert len(found.verdicts) == len(items)
    assert found.ceiling > 0.85
    assert ge2e.similarity(found.voice, encoder.embed_speaker([clips.to_16k(voice)])) > 0.9
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_two_speakers_in_equal_parts_are_refused(voice, other, encoder):
    both = [*cut(voice, 4)[:4], *cut(other, 4)[:4]]
    items = [InputItem(f"{number}.wav", wav(part)) for number, part in enumerate(both)]
    with pytest.raises(OptionError, match="other speakers"):
        training_material.gather_material(items, {}, said("words"), encoder)


def test_too_few_clips_are_refused_with_the_reasons(voice, encoder, rng):
    noise = 0.1 * rng.standard_normal(4 * RATE_HZ).astype(np.float32)
    items = [
        InputItem("good.wav", wav(voice[: 5 * RATE_HZ])),
        InputItem("noise.wav", wav(noise)),
        InputItem("bad.wav", b"x"),
    ]
    with pytest.raises(TooFewClips) as raised:
        training_material.gather_material(items, {}, said("words"), encoder)
    assert "1 usable clip" in str(raised.value)
    assert "noise.wav: it is noisy" in str(raised.value)
    assert "bad.wav: " in str(raised.value)


def test_an_absent_folder_is_an_error(encoder, tmp_path):
    with pytest.raises(AsrServeError):
        training_material.gather_material(expand_inputs([str(tmp_path / "nowhere")]), {}, said("x"), encoder)


def test_real_speech_is_segmented_and_numbers_are_verbalized(packaged_speech):
    with CloningRecognizer() as ear:
        heard = ear(read_audio(packaged_speech / "two_cities.wav"))
    assert len(heard) > 3
    assert all(part.end - part.start <= 16_000 * clips.LONGEST_S for part in heard)
    assert "it was the best of times" in " ".join(part.text for part in heard).lower()
    aloud = TextPhonemizer(tts_card("fastpitch-en"), "heart")
    assert aloud("It was 3 dollars.") == aloud("It was three dollars.")
    with pytest.raises(OptionError):
        aloud("Это было")
