"""Writer of small Kaldi models of random weights, with every part that the published ones have."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

CEPSTRA, WIDTH, RANK, PDFS, IVECTOR, GAUSSIANS, PROJECTED = 8, 12, 5, 9, 4, 7, 6
SILENCE_PHONE, SILENCE_PDFS = 1, (0, 1)
MEAN = np.array([67.0, -22.0, -5.0, -6.0, -3.0, -4.0, -2.0, -2.0], np.float32)
"""Mean cepstra of noise: what is normalized by it changes from frame to frame."""
LEFT, RIGHT = 9, 7
"""Context of the network in frames."""
SPLICE = 3


class Phone(NamedTuple):
    """States of a phone, each with its two pdfs, in a topology of one state with a loop and an exit."""

    number: int
    forward_pdf: int
    loop_pdf: int


PHONES = (Phone(1, 0, 1), Phone(2, 2, 3), Phone(3, 4, 5), Phone(4, 6, 7), Phone(5, 8, 2))

LINES = """
input-node name=ivector dim=4
input-node name=input dim=8
component-node name=idct component=idct input=input
component-node name=norm0 component=norm0 input=idct
dim-range-node name=copy1 input-node=norm0 dim-offset=0 dim=8
dim-range-node name=low input-node=norm0 dim-offset=2 dim=3
component-node name=deltas component=noop24 input=Append(norm0, Sum(Offset(Scale(-1, copy1), -1), Offset(norm0, 1)), \
Sum(Offset(norm0, -2), Sum(Offset(norm0, 2), Scale(-2, copy1))))
component-node name=norm1 component=norm1 input=deltas
component-node name=first.affine component=first.affine input=Append(norm1, low, ReplaceIndex(ivector, t, 0))
component-node name=first.relu component=relu input=first.affine
component-node name=first.norm component=first.norm input=first.relu
component-node name=first component=dropout input=first.norm
component-node name=second.linear component=second.linear input=first
component-node name=second.affine component=second.affine input=second.linear
component-node name=second.relu component=relu input=second.affine
component-node name=second.norm component=second.norm input=second.relu
component-node name=second component=noop input=Sum(Scale(0.75, first), second.norm)
component-node name=third.linear component=third.linear input=second
component-node name=third.affine component=third.affine input=third.linear
component-node name=third.relu component=relu input=third.affine
component-node name=third.norm component=third.norm input=third.relu
component-node name=third component=noop input=Sum(Scale(0.75, second), third.norm)
component-node name=fourth.linear component=fourth.linear input=third
component-node name=fourth.relu component=relu input=fourth.linear
component-node name=fourth.norm component=fourth.norm input=Sum(fourth.relu, fourth.linear)
component-node name=output.affine component=output.affine input=fourth.norm
output-node name=output input=output.affine objective=linear
component-node name=xent component=xent input=third
output-node name=output-xent input=xent objective=linear
"""


class Writer:
    """Kaldi's binary format."""

    def __init__(self) -> None:
        self.data = bytearray(b"\0B")

    def token(self, *tokens: str) -> Writer:
        for token in tokens:
            self.data += f"{token} ".encode()
        return self

    def integer(self, *values: int) -> Writer:
        for value in values:
            self.data += struct.pack("<bi", 4, value)
        return self

    def real(self, *values: float) -> Writer:
        for value in values:
            self.data += struct.pack("<bf", 4, value)
        return self

    def flag(self, value: bool) -> Writer:
        self.data += b"T" if value else b"F"
        return self

    def vector(self, values: np.ndarray) -> Writer:
        self.token("DV" if values.dtype == np.float64 else "FV").integer(len(values))
        self.data += values.tobytes()
        return self

    def matrix(self, values: np.ndarray) -> Writer:
        self.token("DM" if values.dtype == np.float64 else "FM").integer(*values.shape)
        self.data += np.ascontiguousarray(values).tobytes()
        return self

    def symmetric(self, values: np.ndarray) -> Writer:
        self.token("DP").integer(len(values))
        self.data += values[np.tril_indices(len(values))].tobytes()
        return self

    def integers(self, values: Sequence[int]) -> Writer:
        self.data += struct.pack(f"<bi{len(values)}i", 4, len(values), *values)
        return self


def write_model(folder: Path, seed: int) -> None:
    """Write am, conf and ivector of a Vosk folder."""
    rng = np.random.default_rng(seed)
    for name in ("am", "conf", "ivector"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "am/final.mdl").write_bytes(acoustic_model(rng))
    (folder / "conf/mfcc.conf").write_text(
        f"--use-energy=false\n--num-ceps={CEPSTRA}\n--num-mel-bins=12 # few\n--low-freq=40\n--high-freq=-200\n"
    )
    (folder / "conf/model.conf").write_text(
        "--min-active=200\n--max-active=3000\n--beam=10.0\n--lattice-beam=2.0\n--acoustic-scale=1.0\n"
        f"--frame-subsampling-factor=3\n--endpoint.silence-phones={SILENCE_PHONE}\n"
        "--endpoint.rule2.min-trailing-silence=0.5\n"
    )
    (folder / "ivector/online_cmvn.conf").write_text("# nothing but defaults\n")
    (folder / "ivector/splice.conf").write_text(f"--left-context={SPLICE}\n--right-context={SPLICE}\n")
    write_ivectors(folder / "ivector", rng)


def _array(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)


def acoustic_model(rng: np.random.Generator) -> bytes:
    writer = Writer()
    writer.token("<TransitionModel>", "<Topology>")
    writer.integers([phone.number for phone in PHONES]).integers([-1, *[0] * len(PHONES)])
    # A negative count says that states have two pdfs. One entry of two states, the last without transitions.
    writer.integer(-1, 1, 2).integer(0, 1, 2, 0).real(0.5).integer(1).real(0.5).integer(-1, -1, 0)
    writer.token("</Topology>", "<Tuples>").integer(len(PHONES))
    for phone in PHONES:
        writer.integer(phone.number, 0, phone.forward_pdf, phone.loop_pdf)
    writer.token("</Tuples>", "<LogProbs>").vector(np.full(1 + 2 * len(PHONES), -0.7, np.float32))
    writer.token("</LogProbs>", "</TransitionModel>", "<Nnet3>")
    writer.data += LINES.encode() + b"\n"
    components = _components(rng)
    writer.token("<NumComponents>").integer(len(components))
    for name, data in components.items():
        writer.token("<ComponentName>", name)
        writer.data += data
    writer.token("</Nnet3>", "<LeftContext>").integer(LEFT).token("<RightContext>").integer(RIGHT)
    writer.token("<Priors>").vector(np.zeros(0, np.float32))
    return bytes(writer.data)


def _components(rng: np.random.Generator) -> dict[str, bytes]:
    spliced = 3 * CEPSTRA + 3 + IVECTOR

    def plain(kind: str, width: int) -> bytes:
        writer = Writer().token(f"<{kind}>", "<Dim>").integer(width)
        if kind == "GeneralDropoutComponent":
            writer.token("<BlockDim>").integer(width).token("<TimePeriod>").integer(0)
            writer.token("<DropoutProportion>").real(0.1).token("<Continuous>")
        elif kind == "RectifiedLinearComponent":
            writer.token("<ValueAvg>").vector(np.zeros(0, np.float32)).token("<DerivAvg>")
            writer.vector(np.zeros(0, np.float32)).token("<Count>").real(0.0)
        else:
            writer.token("<BackpropScale>").real(1.0)
        return bytes(writer.token(f"</{kind}>").data[2:])

    def norm(width: int, block: int) -> bytes:
        mean, variance = _array(rng, block), rng.uniform(0.2, 2.0, block).astype(np.float32)
        writer = Writer().token("<BatchNormComponent>", "<Dim>").integer(width).token("<BlockDim>").integer(block)
        writer.token("<Epsilon>").real(0.001).token("<TargetRms>").real(0.5).token("<TestMode>").flag(False)
        writer.token("<Count>").real(10.0).token("<StatsMean>").vector(mean).token("<StatsVar>").vector(variance)
        return bytes(writer.token("</BatchNormComponent>").data[2:])

    def centred() -> bytes:
        weight = _array(rng, CEPSTRA, CEPSTRA, scale=0.3)
        writer = Writer().token("<FixedAffineComponent>", "<LinearParams>").matrix(weight)
        return bytes(writer.token("<BiasParams>").vector(-weight @ MEAN).token("</FixedAffineComponent>").data[2:])

    def product(kind: str, rows: int, columns: int, offsets: Sequence[int] = (), bias: bool = True) -> bytes:
        writer = Writer().token(f"<{kind}>")
        writer.token("<MaxChange>").real(0.75).token("<LearningRate>").real(0.001)
        weight = _array(rng, rows, columns * max(1, len(offsets)), scale=1.5)
        if offsets:
            writer.token("<TimeOffsets>").integers(offsets)
        if kind == "LinearComponent":
            writer.token("<Params>").matrix(weight).token("<OrthonormalConstraint>").real(-1.0)
        else:
            writer.token("<LinearParams>").matrix(weight)
            writer.token("<BiasParams>").vector(_array(rng, rows) if bias else np.zeros(0, np.float32))
        if kind == "TdnnComponent":
            writer.token("<UseNaturalGradient>").flag(True).token("<RankInOut>").integer(20, 80)
            writer.token("<AlphaInOut>").real(4.0, 4.0)
        return bytes(writer.token(f"</{kind}>").data[2:])

    return {
        "idct": centred(),
        "norm0": norm(CEPSTRA, CEPSTRA),
        "noop24": plain("NoOpComponent", 3 * CEPSTRA),
        "norm1": norm(3 * CEPSTRA, CEPSTRA),
        "first.affine": product("NaturalGradientAffineComponent", WIDTH, spliced),
        "relu": plain("RectifiedLinearComponent", WIDTH),
        "first.norm": norm(WIDTH, WIDTH),
        "dropout": plain("GeneralDropoutComponent", WIDTH),
        "noop": plain("NoOpComponent", WIDTH),
        "second.linear": product("TdnnComponent", RANK, WIDTH, (-1, 0), bias=False),
        "second.affine": product("TdnnComponent", WIDTH, RANK, (0, 2)),
        "second.norm": norm(WIDTH, WIDTH),
        "third.linear": product("TdnnComponent", RANK, WIDTH, (-3, 0), bias=False),
        "third.affine": product("TdnnComponent", WIDTH, RANK, (0, 3)),
        "third.norm": norm(WIDTH, WIDTH // 3),
        "fourth.linear": product("TdnnComponent", WIDTH, WIDTH, (-3, 0), bias=True),
        "fourth.norm": norm(WIDTH, WIDTH),
        "output.affine": product("NaturalGradientAffineComponent", PDFS, WIDTH),
        "xent": product("NaturalGradientAffineComponent", PDFS, WIDTH),
    }


def write_ivectors(folder: Path, rng: np.random.Generator) -> None:
    inverse = rng.uniform(0.5, 2.0, (GAUSSIANS, PROJECTED)).astype(np.float32)
    means = (2 * rng.standard_normal((GAUSSIANS, PROJECTED))).astype(np.float32)
    weights = rng.dirichlet(np.ones(GAUSSIANS)).astype(np.float32)
    constants = np.log(weights) + 0.5 * (np.log(inverse).sum(1) - PROJECTED * np.log(2 * np.pi))
    constants = (constants - 0.5 * (means**2 * inverse).sum(1)).astype(np.float32)
    ubm = Writer().token("<DiagGMM>", "<GCONSTS>").vector(constants).token("<WEIGHTS>").vector(weights)
    ubm.token("<MEANS_INVVARS>").matrix(means * inverse).token("<INV_VARS>").matrix(inverse).token("</DiagGMM>")
    (folder / "final.dubm").write_bytes(bytes(ubm.data))
    extractor = Writer().token("<IvectorExtractor>", "<w>").matrix(np.zeros((0, 0)))
    extractor.token("<w_vec>").vector(weights.astype(np.float64)).token("<M>").integer(GAUSSIANS)
    for _ in range(GAUSSIANS):
        extractor.matrix(rng.standard_normal((PROJECTED, IVECTOR)))
    extractor.token("<SigmaInv>")
    for each in inverse:
        root = rng.standard_normal((PROJECTED, PROJECTED)) * 0.2
        extractor.symmetric(np.diag(each.astype(np.float64)) + root @ root.T)
    extractor.token("<IvectorOffset>")
    extractor.data += struct.pack("<bd", 8, 2.5)
    (folder / "final.ie").write_bytes(bytes(extractor.token("</IvectorExtractor>").data))
    spliced = CEPSTRA * (2 * SPLICE + 1)
    projection = Writer().matrix(_array(rng, PROJECTED, spliced + 1, scale=0.15))
    (folder / "final.mat").write_bytes(bytes(projection.data))
    count, mean = 1e4, MEAN + 5 * rng.standard_normal(CEPSTRA)
    lines = [[*(mean * count), count], [*(mean**2 * count + 1e6), 0.0]]
    text = "\n".join(" ".join(f"{value:.7g}" for value in line) for line in lines)
    (folder / "global_cmvn.stats").write_text(f" [\n  {text} ]\n")
