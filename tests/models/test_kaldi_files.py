"""Kaldi's files: kaldi_native_io's numbers, and errors that name the file and the place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_kaldi
from safetensors.numpy import load_file

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.checkpoints import kaldi_files

FIXTURE = load_file(Path(__file__).parent / "fixtures" / "kaldi_files.safetensors")
NAMES = sorted({name.rpartition("/")[0] for name in FIXTURE})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("kaldi")
    tiny_kaldi.write_model(path, 1)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_equals_kaldi_native_io(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(FIXTURE[f"{name}/file"].tobytes())
    want = FIXTURE[f"{name}/values"]
    got = kaldi_files.KaldiReader(path).vector() if "vector" in name else kaldi_files.read_matrix(path)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_transition_ids_of_phones_and_outputs(folder: Path) -> None:
    model = kaldi_files.read_acoustic_model(folder / "am/final.mdl")
    want = [(-1, -1, False)]
    for phone in tiny_kaldi.PHONES:
        want += [(phone.loop_pdf, phone.number, True), (phone.forward_pdf, phone.number, False)]
    arrays = (array.tolist() for array in model.transitions)
    assert list(zip(*arrays, strict=True)) == want
    assert model.priors.shape == (0,)
    assert model.network.components["second.linear"].array("<TimeOffsets>").tolist() == [-1, 0]
    assert model.network.components["dropout"].fields["<Continuous>"] == ()


def test_constants_of_gaussians_are_those_of_their_parameters(folder: Path) -> None:
    ubm = kaldi_files.read_diagonal_gaussians(folder / "ivector/final.dubm")
    x = np.random.default_rng(0).standard_normal(tiny_kaldi.PROJECTED)
    variances = 1 / ubm.inverse_variances.astype(np.float64)
    means = ubm.linear * variances
    logs = -0.5 * (np.log(2 * np.pi * variances) + (x - means) ** 2 / variances).sum(1)
    ours = ubm.constants + ubm.linear @ x - 0.5 * ubm.inverse_variances @ x**2
    weights = np.exp(ours - logs)
    assert abs(weights.sum() - 1) < 1e-4


FILES = {
    "am/final.mdl": kaldi_files.read_acoustic_model,
    "ivector/final.ie": kaldi_files.read_ivector_extractor,
    "ivector/final.dubm": kaldi_files.read_diagonal_gaussians,
    "ivector/final.mat": kaldi_files.read_matrix,
    "ivector/global_cmvn.stats": kaldi_files.read_matrix,
}


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith("stats")])
def test_a_file_that_ends_early_names_the_place(name: str, folder: Path, tmp_path: Path) -> None:
    data = (folder / name).read_bytes()
    path = tmp_path / "short"
    for size in {0, 1, 2, 9, len(data) // 3, len(data) // 2, len(data) - 1}:
        path.write_bytes(data[:size])
        with pytest.raises(WeightsCorrupt, match=r"short"):
            FILES[name](path)


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_never_raise_anything_else(name: str, folder: Path, tmp_path: Path) -> None:
    data = (folder / name).read_bytes()
    path, rng = tmp_path / "damaged", np.random.default_rng(4)
    refused = 0
    for _ in range(150):
        changed = bytearray(data)
        for at in rng.integers(0, min(len(data), 2_000), 3):
            changed[at] = int(rng.integers(256))
        path.write_bytes(bytes(changed))
        try:
            FILES[name](path)
        except WeightsCorrupt:
            refused += 1
    assert refused


@pytest.mark.parametrize(
    ("text", "problem"), [("1 begin\n2 middle\n", "line 2"), ("one begin\n", "line 1"), ("1\n", "line 1")]
)
def test_word_boundaries_are_checked(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "word_boundary.int"
    path.write_text(text)
    with pytest.raises(WeightsCorrupt, match=problem):
        kaldi_files.read_word_boundaries(path)


def test_word_boundaries(tmp_path: Path) -> None:
    path = tmp_path / "word_boundary.int"
    path.write_text("1 nonword\n4 singleton\n2 begin\n3 internal\n5 end\n")
    assert kaldi_files.read_word_boundaries(path).tolist() == [0, 0, 1, 3, 4, 2]


def test_options(tmp_path: Path) -> None:
    path = tmp_path / "file.conf"
    path.write_text("# a comment\n\n--beam=10.0 # wide\n--use-energy\n")
    assert kaldi_files.read_options(path) == {"beam": "10.0", "use-energy": "true"}
    path.write_text("beam=10\n")
    with pytest.raises(WeightsCorrupt, match="line 1"):
        kaldi_files.read_options(path)
