"""Conversion of a model folder of Vosk's, with Kaldi's files, into a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from asr_serve import units
from asr_serve.audio.features.kaldi_mfcc import KaldiMfccOptions
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.kaldi_chain import nnet3
from asr_serve.models.asr.kaldi_chain.ivectors import IvectorOptions
from asr_serve.models.asr.kaldi_chain.network import LayerSpec
from asr_serve.models.checkpoints import kaldi_files, openfst_files

MODEL, EXTRACTOR, UBM = "am/final.mdl", "ivector/final.ie", "ivector/final.dubm"
PROJECTION, CMVN_STATS = "ivector/final.mat", "ivector/global_cmvn.stats"
MFCC_OPTIONS, DECODER_OPTIONS = "conf/mfcc.conf", "conf/model.conf"
CMVN_OPTIONS, SPLICE_OPTIONS = "ivector/online_cmvn.conf", "ivector/splice.conf"
LABELS_TO_WORDS, WORDS = "graph/HCLr.fst", "graph/Gr.fst"
SILENT_LABELS, PHONE_BOUNDARIES = "graph/disambig_tid.int", "graph/phones/word_boundary.int"
FILES = (
    MODEL,
    EXTRACTOR,
    UBM,
    PROJECTION,
    CMVN_STATS,
    MFCC_OPTIONS,
    DECODER_OPTIONS,
    CMVN_OPTIONS,
    SPLICE_OPTIONS,
    LABELS_TO_WORDS,
    WORDS,
    SILENT_LABELS,
    PHONE_BOUNDARIES,
)
IGNORED_OPTIONS = {"allow-downsample", "allow-upsample", "max-feature-vectors", "print-args", "verbose"}
"""Options that change nothing: audio comes at the model's rate."""
SPACE = "\u2581"
UNSPACED = re.compile(r"[\u2e80-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
"""Characters of scripts that put no space between words."""


def is_vosk_folder(folder: Path) -> bool:
    """Returns whether `folder` holds a chain model as Vosk publishes it, with a graph that is composed while it is
    searched."""
    return folder.is_dir() and all((folder / name).is_file() for name in FILES)


def convert(source: Path, target: Path) -> None:
    """Reads Kaldi's files in `source` into a checkpoint in `target`. Raises WeightsCorrupt."""
    settings, tensors, transitions = read_acoustics(source)
    graph, symbols = openfst_files.read_lookahead_graph(
        source / LABELS_TO_WORDS,
        source / WORDS,
        np.maximum(transitions.pdfs, 0),
        label_phones=transitions.phones,
        phone_boundaries=kaldi_files.read_word_boundaries(source / PHONE_BOUNDARIES),
        silent_labels=kaldi_files.read_integer_list(source / SILENT_LABELS),
    )
    pieces = _pieces(symbols)
    settings |= {"model_type": "kaldi_chain", "vocab_size": len(pieces)}
    (target / "config.json").write_text(json.dumps(settings, indent=1))
    (target / "pieces.json").write_text(json.dumps(pieces, ensure_ascii=False), encoding="utf-8")
    graph.save(target)
    save_file(tensors, target / "model.safetensors")


def read_acoustics(source: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], kaldi_files.TransitionModel]:
    """Settings but for `vocab_size`, tensors, and transitions of a folder's acoustic model. Raises WeightsCorrupt."""
    model = kaldi_files.read_acoustic_model(source / MODEL)
    if len(model.priors):
        raise WeightsCorrupt(f"{source / MODEL} has priors of its outputs", "a chain model, which has none")
    layers, widths = nnet3.compile_network(model.network)
    mfcc = _mfcc(source / MFCC_OPTIONS)
    if widths[nnet3.INPUT] != mfcc.coefficients:
        raise WeightsCorrupt(f"{source / MODEL} reads {widths[nnet3.INPUT]} numbers", f"{mfcc.coefficients} cepstra")
    ivector, tensors = _ivectors(source, mfcc.coefficients, widths[nnet3.IVECTOR])
    specs = []
    for layer in layers:
        inputs, scales = tuple(layer.inputs), tuple(layer.scales)
        specs.append(LayerSpec(layer.name, inputs, layer.width, scales, layer.relu, layer.ivector is not None))
        if layer.weights:
            assert layer.bias is not None, "a matrix without a bias"
            tensors[f"layers.{layer.name}.weight"] = np.concatenate(layer.weights, axis=1)
            tensors[f"layers.{layer.name}.bias"] = layer.bias
        if layer.ivector is not None:
            tensors[f"layers.{layer.name}.ivector"] = layer.ivector
    transitions = model.transitions
    if transitions.pdfs.max() >= layers[-1].width:
        raise WeightsCorrupt(
            f"{source / MODEL} has a transition to output {transitions.pdfs.max()}", f"{layers[-1].width} outputs"
        )
    decoder = _decoder(source / DECODER_OPTIONS)
    silence = np.isin(transitions.phones, decoder["silence_phones"])
    settings = {
        "layers": msgspec.to_builtins(specs),
        "mfcc": msgspec.to_builtins(mfcc),
        "ivector": msgspec.to_builtins(ivector),
        # Outputs that other phones share are not silence.
        "silence_pdfs": sorted(set(transitions.pdfs[silence].tolist()) - set(transitions.pdfs[~silence].tolist())),
        **decoder,
    }
    arrays = {name: torch.from_numpy(np.array(array, np.float32, order="C")) for name, array in tensors.items()}
    return settings, arrays, transitions


def _pieces(symbols: Mapping[int, str]) -> list[str]:
    """Words by id, each with the space before it, if its script has spaces; what is no word is empty."""
    pieces = [""] * (max(symbols, default=-1) + 1)
    for number, word in symbols.items():
        if not (word[:1] in "<[#" and (word[-1:] in ">]" or word[:1] == "#")):
            pieces[number] = word if UNSPACED.match(word) else SPACE + word
    return pieces


def _mfcc(path: Path) -> KaldiMfccOptions:
    options = kaldi_files.read_options(path)
    fixed = {
        "sample-frequency": float(units.RATE_HZ),
        "frame-length": 25.0,
        "frame-shift": 10.0,
        "use-energy": False,
        "snip-edges": True,
        "window-type": "povey",
        "preemphasis-coefficient": 0.97,
        "remove-dc-offset": True,
        "round-to-power-of-two": True,
        "htk-compat": False,
    }
    # Kaldi's default is energy in place of the first cepstrum.
    options.setdefault("use-energy", "true")
    for name, allowed in fixed.items():
        given = options.pop(name, None)
        if given is not None and _parsed(path, name, given, type(allowed)) != allowed:
            raise WeightsCorrupt(f"{path}: --{name}={given}", f"{allowed}")
    for name in IGNORED_OPTIONS:
        options.pop(name, None)
    kept = {
        "coefficients": _parsed(path, "num-ceps", options.pop("num-ceps", "13"), int),
        "mels": _parsed(path, "num-mel-bins", options.pop("num-mel-bins", "23"), int),
        "low_hz": _parsed(path, "low-freq", options.pop("low-freq", "20"), float),
        "high_hz": _parsed(path, "high-freq", options.pop("high-freq", "0"), float),
        "lifter": _parsed(path, "cepstral-lifter", options.pop("cepstral-lifter", "22"), float),
        "dither": _parsed(path, "dither", options.pop("dither", "1"), float),
    }
    _refuse(path, options)
    return KaldiMfccOptions(**kept)


def _decoder(path: Path) -> dict[str, Any]:
    """Settings of the search, as Config names them."""
    options = kaldi_files.read_options(path)
    phones = options.pop("endpoint.silence-phones", "").replace(",", ":")
    settings: dict[str, Any] = {
        "silence_phones": [_parsed(path, "endpoint.silence-phones", each, int) for each in phones.split(":") if each],
        "subsampling": _parsed(path, "frame-subsampling-factor", options.pop("frame-subsampling-factor", "1"), int),
        "acoustic_scale": _parsed(path, "acoustic-scale", options.pop("acoustic-scale", "0.1"), float),
        "beam": _parsed(path, "beam", options.pop("beam", "16"), float),
        "lattice_beam": _parsed(path, "lattice-beam", options.pop("lattice-beam", "10"), float),
        "max_active": _parsed(path, "max-active", options.pop("max-active", "2147483647"), int),
        "min_active": _parsed(path, "min-active", options.pop("min-active", "200"), int),
    }
    # Pauses that end a segment are the server's decision.
    _refuse(path, {k: v for k, v in options.items() if not k.startswith("endpoint.") and k not in IGNORED_OPTIONS})
    return settings


def _ivectors(source: Path, feature_width: int, width: int) -> tuple[IvectorOptions, dict[str, np.ndarray]]:
    """Options and tensors of the i-vector extractor."""
    extractor = kaldi_files.read_ivector_extractor(source / EXTRACTOR)
    ubm = kaldi_files.read_diagonal_gaussians(source / UBM)
    projections, inverse = extractor.projections, extractor.inverse_covariances
    if projections.shape[2] != width or projections.shape[:2] != ubm.linear.shape:
        raise WeightsCorrupt(
            f"{source / EXTRACTOR} has {projections.shape[0]} Gaussians of {projections.shape[1]} numbers and vectors "
            f"of {projections.shape[2]}",
            f"{len(ubm.linear)} of {ubm.linear.shape[1]}, and {width}",
        )
    cmvn = kaldi_files.read_options(source / CMVN_OPTIONS)
    splice = kaldi_files.read_options(source / SPLICE_OPTIONS)
    window = _parsed(source / CMVN_OPTIONS, "cmn-window", cmvn.pop("cmn-window", "600"), int)
    of_training = _parsed(source / CMVN_OPTIONS, "global-frames", cmvn.pop("global-frames", "200"), int)
    cmvn.pop("speaker-frames", None)  # of earlier utterances, which a session does not have
    _refuse(source / CMVN_OPTIONS, cmvn)
    left, right = (
        _parsed(source / SPLICE_OPTIONS, name, splice.pop(name, "4"), int) for name in ("left-context", "right-context")
    )
    _refuse(source / SPLICE_OPTIONS, splice)
    stats, projection = kaldi_files.read_matrix(source / CMVN_STATS), kaldi_files.read_matrix(source / PROJECTION)
    if stats.shape != (2, feature_width + 1) or not stats[0, -1] > 0:
        raise WeightsCorrupt(f"{source / CMVN_STATS} is {stats.shape}", f"sums of {feature_width} numbers and a count")
    spliced = feature_width * (left + 1 + right)
    if projection.shape[0] != ubm.linear.shape[1] or projection.shape[1] not in (spliced, spliced + 1):
        raise WeightsCorrupt(f"{source / PROJECTION} is {projection.shape}", f"{ubm.linear.shape[1]} by {spliced} + 1")
    if projection.shape[1] == spliced:
        projection = np.pad(projection, ((0, 0), (0, 1)))
    weighted = inverse @ projections
    scatters = np.swapaxes(projections, 1, 2) @ weighted
    rows, columns = np.tril_indices(width)
    options = IvectorOptions(
        width=width,
        prior_offset=extractor.prior_offset,
        splice_left_frames=left,
        splice_right_frames=right,
        window_frames=window,
        global_frames=min(of_training, window),
    )
    tensors = {
        "splice": projection,
        "cmvn_mean": stats[0, :-1] / stats[0, -1],
        "ubm.constants": ubm.constants,
        "ubm.weight": np.concatenate([ubm.linear, -0.5 * ubm.inverse_variances], axis=1),
        "ubm.projections": weighted,
        "ubm.scatters": scatters[:, rows, columns],
    }
    return options, {f"ivectors.{name}": array for name, array in tensors.items()}


def _parsed(path: Path, name: str, text: str, kind: type[Any]) -> Any:
    truths = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
    try:
        return truths[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError) as failure:
        raise WeightsCorrupt(f"{path}: --{name}={text}", f"a {kind.__name__}") from failure


def _refuse(path: Path, options: Mapping[str, str]) -> None:
    if options:
        raise WeightsCorrupt(f"{path}: --{' --'.join(options)}", "options that the model is computed with")
