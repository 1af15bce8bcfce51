"""Kaldi chain models evaluated straight from Kaldi's files: every node of the network at every frame, every frame of
the i-vector statistics by itself, in float64 and without state between blocks. Slow; the oracle of kaldi_chain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asr_serve.models.checkpoints import kaldi_files

SILENCE_WEIGHT, MAX_COUNT, POSTERIOR_SCALE, MIN_POST, SELECT = 1e-3, 100.0, 0.1, 0.025, 5
CMN_WINDOW, GLOBAL_FRAMES, SPLICE = 600, 200, 3
CG_STEPS = 15


class Network:
    """Evaluates the node `output` by its descriptors, over whole arrays of frames."""

    def __init__(self, network: kaldi_files.Nnet3) -> None:
        self.components = network.components
        self.inputs: dict[str, tuple[str, str]] = {}
        for line in network.lines:
            name = re.search(r" name=(\S+)", line)
            if name is None:
                continue
            component, source = re.search(r"component=(\S+)", line), re.search(r"input=(.*?)( objective=.*)?$", line)
            if line.startswith("dim-range-node"):
                node, start, width = (re.search(rf"{k}=(\S+)", line)[1] for k in ("input-node", "dim-offset", "dim"))  # type: ignore[index]
                self.inputs[name[1]] = (f"range {start} {width}", node)
            elif source is not None:
                self.inputs[name[1]] = (component[1] if component else "", source[1])

    def scores(self, frames: np.ndarray, ivectors: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """`frames` (n, width), `ivectors` (n, width) of each; `wanted` (m,): frames to return scores of, which are
        right where all the context lies within."""
        self._given = {"input": frames.astype(np.float64), "ivector": ivectors.astype(np.float64)}
        return self._node("output")[wanted]

    def _node(self, name: str) -> np.ndarray:
        if name not in self._given:
            component, text = self.inputs[name]
            if component.startswith("range"):
                start, width = map(int, component.split()[1:])
                self._given[name] = self._node(text)[:, start : start + width]
            else:
                x = self._descriptor(text.strip())
                self._given[name] = self._component(self.components[component], x) if component else x
        return self._given[name]

    def _descriptor(self, text: str) -> np.ndarray:
        if "(" not in text:
            return self._node(text)
        head, inside = text.split("(", 1)
        arguments, depth, start = [], 0, 0
        inside = inside.rstrip()[:-1]
        for i, letter in enumerate(inside + ","):
            depth += (letter == "(") - (letter == ")")
            if letter == "," and depth == 0:
                arguments.append(inside[start:i].strip())
                start = i + 1
        match head.strip():
            case "Append":
                return np.concatenate([self._descriptor(each) for each in arguments], axis=1)
            case "Sum":
                return sum(self._descriptor(each) for each in arguments)  # type: ignore[return-value]
            case "Offset":
                return _shifted(self._descriptor(arguments[0]), int(arguments[1]))
            case "Scale":
                return float(arguments[0]) * self._descriptor(arguments[1])
            case "ReplaceIndex":
                return self._descriptor(arguments[0])  # the frames of a block have one i-vector
        raise ValueError(text)

    @staticmethod
    def _component(component: kaldi_files.KaldiComponent, x: np.ndarray) -> np.ndarray:
        kind, fields = component.kind, component.fields
        if kind == "BatchNormComponent":
            mean, variance = component.array("<StatsMean>"), component.array("<StatsVar>")
            y = x.reshape(len(x), -1, len(mean))
            y = (y - mean) * component.number("<TargetRms>") / np.sqrt(variance + component.number("<Epsilon>"))
            return y.reshape(x.shape)
        if kind == "RectifiedLinearComponent":
            return np.maximum(x, 0)
        if kind == "LinearComponent":
            return x @ component.array("<Params>").astype(np.float64).T
        if "<LinearParams>" in fields:
            offsets = component.array("<TimeOffsets>").tolist() if "<TimeOffsets>" in fields else [0]
            y = np.concatenate([_shifted(x, offset) for offset in offsets], axis=1)
            y = y @ component.array("<LinearParams>").astype(np.float64).T
            bias = component.array("<BiasParams>")
            return y + bias if len(bias) else y
        return x


def _shifted(x: np.ndarray, offset: int) -> np.ndarray:
    return np.roll(x, -offset, axis=0)


class Speaker:
    """Kaldi's OnlineIvectorFeature of one session, frame by frame."""

    def __init__(self, folder: Path) -> None:
        self.extractor = kaldi_files.read_ivector_extractor(folder / "ivector/final.ie")
        self.ubm = kaldi_files.read_diagonal_gaussians(folder / "ivector/final.dubm")
        self.lda = kaldi_files.read_matrix(folder / "ivector/final.mat").astype(np.float64)
        self.stats = kaldi_files.read_matrix(folder / "ivector/global_cmvn.stats")
        self.width = self.extractor.projections.shape[2]

    def prepare(self, frames: np.ndarray) -> None:
        """`frames` (n, width): all the session's."""
        self.frames, self.normalized = frames.astype(np.float64), np.empty(frames.shape)
        mean_count = self.stats[0, -1]
        for t in range(len(frames)):
            window = self.frames[max(0, t - CMN_WINDOW + 1) : t + 1]
            total, count = window.sum(0), float(len(window))
            extra = min(CMN_WINDOW - count, GLOBAL_FRAMES)
            total = total + extra * self.stats[0, :-1] / mean_count
            self.normalized[t] = self.frames[t] - total / (count + extra)
        self.contributions = [self._contribution(t) for t in range(len(frames))]
        self.ivector = np.zeros(self.width)
        self.ivector[0] = self.extractor.prior_offset

    def _spliced(self, frames: np.ndarray, t: int) -> np.ndarray:
        around = [frames[min(max(t + i, 0), len(frames) - 1)] for i in range(-SPLICE, SPLICE + 1)]
        return self.lda[:, :-1] @ np.concatenate(around) + self.lda[:, -1]

    def _contribution(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        seen, x = self._spliced(self.normalized, t), self._spliced(self.frames, t)
        scores = self.ubm.constants + self.ubm.linear @ seen - 0.5 * self.ubm.inverse_variances @ (seen * seen)
        best = sorted(range(len(scores)), key=lambda g: -scores[g])[:SELECT]
        shares = [(g, float(np.exp(scores[g] - scores[best[0]]))) for g in best]
        shares = [(g, share) for g, share in shares if share > MIN_POST]
        least = MIN_POST * sum(share for _, share in shares)
        while len(shares) > 1 and shares[-1][1] < least:
            shares.pop()
        total = sum(share for _, share in shares)
        linear, quadratic = np.zeros(self.width), np.zeros((self.width, self.width))
        for g, share in shares:
            projection, inverse = self.extractor.projections[g], self.extractor.inverse_covariances[g]
            linear += share / total * (projection.T @ (inverse @ x))
            quadratic += share / total * (projection.T @ inverse @ projection)
        return linear, quadratic

    def estimate(self, weights: np.ndarray, exact: bool = True) -> np.ndarray:
        """I-vector, less the prior's mean, from the first len(weights) frames; by Kaldi's conjugate gradients from
        the last estimate unless `exact`."""
        linear, quadratic = np.zeros(self.width), np.zeros((self.width, self.width))
        for weight, (each, square) in zip(weights, self.contributions, strict=False):
            linear += POSTERIOR_SCALE * weight * each
            quadratic += POSTERIOR_SCALE * weight * square
        scale = max(POSTERIOR_SCALE * float(np.sum(weights)), MAX_COUNT) / MAX_COUNT
        linear[0] += scale * self.extractor.prior_offset
        quadratic += scale * np.eye(self.width)
        self.ivector = np.linalg.solve(quadratic, linear) if exact else _conjugate(quadratic, linear, self.ivector)
        result = self.ivector.copy()
        result[0] -= self.extractor.prior_offset
        return result


def _conjugate(matrix: np.ndarray, right: np.ndarray, x: np.ndarray) -> np.ndarray:
    residual = right - matrix @ x
    direction = residual.copy()
    for _ in range(CG_STEPS):
        square = residual @ residual
        if square < 1e-20:
            break
        product = matrix @ direction
        step = square / (direction @ product)
        x, residual = x + step * direction, residual - step * product
        direction = residual + (residual @ residual) / square * direction
    return x


class Reference:
    """A whole session from its cepstra: blocks in order, since a block's silence decides the next i-vector."""

    def __init__(self, folder: Path, *, silence_pdfs: Sequence[int], left: int, right: int, block: int) -> None:
        model = kaldi_files.read_acoustic_model(folder / "am/final.mdl")
        self.network, self.speaker = Network(model.network), Speaker(folder)
        self.silence_pdfs, self.left, self.right, self.block = list(silence_pdfs), left, right, block

    def scores(self, frames: np.ndarray, exact: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Scores (outputs, pdfs) and i-vectors (blocks + 1, width) of a session's cepstra (n, width)."""
        self.speaker.prepare(frames)
        total = len(frames)
        weights: list[float] = []
        ivectors: list[np.ndarray] = []
        found: list[np.ndarray] = []
        for start in range(0, total, self.block):
            known = min(start + self.block - 3 + self.right - SPLICE + 1, total)
            later = weights[-1] if weights else SILENCE_WEIGHT
            current = np.array([*weights, *[later] * (known - len(weights))])[:known]
            ivectors += [self.speaker.estimate(current, exact)] * (1 if ivectors else 2)
            margin = self.left + self.block
            times = np.arange(start - margin, start + self.block + self.right + margin)
            spoken = np.stack([ivectors[min(max(t // self.block, 0), len(ivectors) - 1)] for t in times])
            outputs = np.arange(start, min(start + self.block, total), 3)
            scores = self.network.scores(frames[np.clip(times, 0, total - 1)], spoken, outputs - times[0])
            found.append(scores)
            silent = np.isin(scores.argmax(1), self.silence_pdfs)
            weights += np.repeat(np.where(silent, SILENCE_WEIGHT, 1.0), 3).tolist()
        return np.concatenate(found), np.stack(ivectors)


def cepstra_of(model: Any, pcm: np.ndarray) -> np.ndarray:
    """A model's features of a whole session."""
    import torch

    needed = max(len(pcm), model.features.window_samples)
    padded = np.pad(pcm, (0, needed - len(pcm)))
    result: np.ndarray = model.features(torch.from_numpy(padded)[None])[0].numpy()
    return result
