"""Silero against the package's own model, and the promises every stage makes about rows and state."""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import soundfile
import torch
from torch import Tensor

from asr_serve.errors import WeightsCorrupt, WeightsMissing
from asr_serve.models.auxiliary import silero
from asr_serve.models.auxiliary.silero import CONTEXT_SAMPLES, WINDOW_SAMPLES, Silero, SileroState


@pytest.fixture(scope="module")
def model() -> Silero:
    return silero.load()


@pytest.fixture(scope="module")
def reference() -> torch.jit.ScriptModule:
    """The model the package runs. Loaded by path: importing the package wants torchaudio."""
    spec = importlib.util.find_spec("silero_vad")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("silero-vad is not installed: pip install 'asr-serve[dev]'")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # theirs to move off torch.jit
        return torch.jit.load(str(Path(spec.submodule_search_locations[0]) / "data" / "silero_vad.jit"))


def read(path: Path) -> Tensor:
    """Samples, with zeros up to a whole window."""
    pcm, rate_hz = soundfile.read(path, dtype="float32")
    assert rate_hz == 16_000
    return torch.from_numpy(np.pad(pcm, (0, -len(pcm) % WINDOW_SAMPLES)))


def said_by(reference: torch.jit.ScriptModule, pcm: Tensor) -> tuple[Tensor, Tensor]:
    """The reference, one window at a time: probabilities (n,), and its h and c after the last (2, 1, 128)."""
    reference.reset_states()
    with torch.no_grad():
        each = [reference(window[None], 16_000) for window in pcm.view(-1, WINDOW_SAMPLES)]
    return torch.cat(each)[:, 0], reference._state


def counts(*windows: int) -> Tensor:
    return torch.tensor(windows)


def noise(rng: np.random.Generator, rows: int, windows: int) -> Tensor:
    """Noise that swells and dies like syllables, so that the state has something to follow."""
    samples = windows * WINDOW_SAMPLES
    swell = np.abs(np.sin(np.arange(samples) / 3_000 + rng.uniform(0, 6, (rows, 1))))
    return torch.from_numpy((rng.standard_normal((rows, samples)) * 0.1 * swell).astype(np.float32))


def assert_same_state(a: SileroState, b: SileroState, atol: float) -> None:
    for ours, theirs in zip(a, b, strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-4)


def test_weights_are_the_references(reference: torch.jit.ScriptModule) -> None:
    """Also the recipe for the file: rename, reshape, save."""
    shipped = safetensors.torch.load_file(silero.WEIGHTS)
    theirs = {silero.rename(key): value for key, value in reference.named_parameters()}
    del theirs[None]
    assert theirs.keys() == shipped.keys()
    for key, value in theirs.items():
        assert torch.equal(value.detach().reshape(shipped[key].shape), shipped[key]), key


def test_equals_reference_on_packaged_speech(
    model: Silero, reference: torch.jit.ScriptModule, packaged_speech: Path
) -> None:
    pcm = read(packaged_speech / "beckett.wav")
    expected, (h, c) = said_by(reference, pcm)
    got, state = model.step(pcm[None], model.state(1), counts(len(expected)))
    assert expected.max() > 0.99
    torch.testing.assert_close(got[0], expected, atol=1e-4, rtol=0)
    assert_same_state(state, SileroState(pcm[None, -CONTEXT_SAMPLES:], h, c), atol=1e-3)


@pytest.mark.exhaustive
def test_equals_reference_on_every_ami_clip(
    model: Silero, reference: torch.jit.ScriptModule, speech_data: Path
) -> None:
    """All clips in one ragged batch, in two steps, as the engine would."""
    paths = sorted((speech_data / "ami").glob("*.flac"))
    if not paths:
        pytest.skip(f"no clips in {speech_data / 'ami'}")
    clips = [read(path) for path in paths]
    windows = [len(clip) // WINDOW_SAMPLES for clip in clips]
    pcm = torch.full((len(clips), max(windows) * WINDOW_SAMPLES), torch.nan)
    for row, clip in enumerate(clips):
        pcm[row, : len(clip)] = clip
    half = [count // 2 for count in windows]
    first, state = model.step(pcm[:, : max(half) * WINDOW_SAMPLES], model.state(len(clips)), counts(*half))
    second_pcm = torch.full_like(pcm, torch.nan)
    for row, clip in enumerate(clips):
        second_pcm[row, : len(clip) - half[row] * WINDOW_SAMPLES] = clip[half[row] * WINDOW_SAMPLES :]
    rest = [count - done for count, done in zip(windows, half, strict=True)]
    second, _ = model.step(second_pcm, state, counts(*rest))
    for row, path in enumerate(paths):
        expected, _ = said_by(reference, clips[row])
        got = torch.cat([first[row, : half[row]], second[row, : rest[row]]])
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0, msg=lambda m, path=path: f"{path.name}: {m}")


@pytest.mark.parametrize("sizes", [[1] * 40, [3, 1, 36], [20, 20], [0, 40, 0], [39, 1]])
def test_any_chunking_is_the_same(model: Silero, rng: np.random.Generator, sizes: list[int]) -> None:
    pcm = noise(rng, 2, 40)
    whole, end = model.step(pcm, model.state(2), counts(40, 40))
    state, parts = model.state(2), []
    for chunk in pcm.split([size * WINDOW_SAMPLES for size in sizes], dim=1):
        part, state = model.step(chunk, state, counts(*[chunk.shape[1] // WINDOW_SAMPLES] * 2))
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=0)
    assert_same_state(state, end, atol=1e-4)


def test_rows_do_not_affect_neighbours_and_padding_is_never_read(model: Silero, rng: np.random.Generator) -> None:
    live = [5, 0, 12, 12, 1, 9]
    pcm = noise(rng, len(live), 12)
    pcm[3] *= 1_000
    begun = SileroState(*(torch.from_numpy(rng.standard_normal(x.shape, np.float32)) for x in model.state(len(live))))
    for row, count in enumerate(live):
        pcm[row, count * WINDOW_SAMPLES :] = torch.nan
    for part in begun:
        part[1] = torch.nan
    before = SileroState(*(part.clone() for part in begun))

    together, after = model.step(pcm, begun, counts(*live))

    assert together.isfinite().all()
    for row, count in enumerate(live):
        mine = SileroState(*(part[row : row + 1] for part in before))
        alone, end = model.step(pcm[row : row + 1, : count * WINDOW_SAMPLES], mine, counts(count))
        torch.testing.assert_close(together[row : row + 1, :count], alone, atol=1e-5, rtol=0)
        assert not together[row, count:].any()
        if count:
            assert_same_state(SileroState(*(part[row : row + 1] for part in after)), end, atol=1e-4)
    for part, was, passed in zip(after, before, begun, strict=True):
        assert part[1].view(torch.int32).equal(was[1].view(torch.int32)), "a dead row's state moved"
        assert passed.view(torch.int32).equal(was.view(torch.int32)), "the state passed in was written to"


def test_a_step_of_nothing(model: Silero) -> None:
    state = model.state(2)
    probabilities, after = model.step(torch.zeros(2, 0), state, counts(0, 0))
    assert probabilities.shape == (2, 0)
    assert all(a.equal(b) for a, b in zip(after, state, strict=True))


def test_every_weight_counts(model: Silero, rng: np.random.Generator) -> None:
    """A model of other weights, beside the first, has other probabilities and leaves the first's as they were."""
    pcm, weights = noise(rng, 1, 8), safetensors.torch.load_file(silero.WEIGHTS)

    def probabilities(model: Silero) -> Tensor:
        return model.step(pcm, model.state(1), counts(8))[0]

    expected = probabilities(model)
    assert expected.equal(probabilities(Silero(weights)))
    for key, value in weights.items():
        assert not probabilities(Silero({**weights, key: 0.5 * value})).equal(expected), key
    assert probabilities(model).equal(expected)


def test_wrong_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = bytearray(silero.WEIGHTS.read_bytes())
    assert hashlib.sha256(raw).hexdigest() == silero.WEIGHTS_SHA256
    raw[-1] ^= 1
    monkeypatch.setattr(silero, "WEIGHTS", tmp_path / "silero.safetensors")
    with pytest.raises(WeightsMissing, match="reinstall"):
        silero.load()
    silero.WEIGHTS.write_bytes(raw)
    with pytest.raises(WeightsCorrupt, match=silero.WEIGHTS_SHA256):
        silero.load()
