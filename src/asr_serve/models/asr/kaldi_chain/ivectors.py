"""Online i-vectors of many sessions: a speaker's vector from the frames so far, with state of fixed size.

A frame is normalized by the mean of a sliding window (filled up with the training data's while it is short), spliced
with its neighbours and projected; the universal background model's posteriors of it weigh the same frame, projected
without normalization, in the statistics of the total-variability model. Frames of silence count little.

A frame's statistics are computed once, from its few likeliest Gaussians. Those of frames whose weight is known are
summed up for good. Newer frames count as much as the last of those, and are counted again, with their own weight,
when it is known.

Source: Kaldi's online2/online-ivector-feature, feat/online-feature (OnlineCmvn), ivector/ivector-extractor; Dehak et
al. 2011, doi:10.1109/TASL.2010.2064307. Kaldi solves for the i-vector by 15 steps of conjugate gradients from the
last one; here it is solved exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.interfaces import StateSpec

Memory = dict[str, Tensor]
"""State of the sessions of a step by name, (sessions, *shape)."""


class IvectorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Kaldi's OnlineIvectorExtractionConfig, OnlineCmvnOptions, OnlineSpliceOptions and the silence weight, as the
    Vosk runtime sets them."""

    width: int
    """Numbers of an i-vector."""
    prior_offset: float
    """Mean of its first number."""
    splice_left_frames: int = 3
    splice_right_frames: int = 3
    window_frames: int = 600
    """Frames of the sliding window of cepstral mean normalization."""
    global_frames: int = 200
    """Frames as which the training data's mean counts at most."""
    selected_gaussians: int = 5
    least_posterior: float = 0.025
    posterior_scale: float = 0.1
    most_counts: float = 100.0
    """Scaled count of frames above which the prior grows with them."""
    silence_weight: float = 1e-3


TENSORS = ("splice", "cmvn_mean", "ubm.constants", "ubm.weight", "ubm.projections", "ubm.scatters")


def tensor_shapes(
    options: IvectorOptions, feature_width: int, projected: int, gaussians: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a checkpoint, without their prefix."""
    spliced = feature_width * (options.splice_left_frames + 1 + options.splice_right_frames)
    return {
        # LDA of spliced frames, its offset in the last column.
        "splice": (projected, spliced + 1),
        # Mean of the training data's features.
        "cmvn_mean": (feature_width,),
        # Log-likelihoods of x are constants + weight @ [x, x * x].
        "ubm.constants": (gaussians,),
        "ubm.weight": (gaussians, 2 * projected),
        # What posterior-weighted sums of frames add to the linear term: inverse covariance @ projection.
        "ubm.projections": (gaussians, projected, options.width),
        # What counts add to the quadratic term: projection^T @ inverse covariance @ projection, lower triangle.
        "ubm.scatters": (gaussians, options.width * (options.width + 1) // 2),
    }


class OnlineIvectors:
    """Extractor of i-vectors. Frames come in blocks of `block_frames`, the last of which are `ahead_frames` after
    the block whose weights come with them."""

    def __init__(
        self,
        options: IvectorOptions,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        *,
        feature_width: int,
        block_frames: int,
        newest: int,
    ) -> None:
        """`newest`: position, from a block's first frame, of the last frame that is known when the block is
        computed."""
        missing = [name for name in TENSORS if name not in tensors]
        if missing:
            raise WeightsCorrupt(f"an i-vector extractor without {', '.join(missing)}", ", ".join(TENSORS))
        gaussians, projected = tensors["ubm.projections"].shape[:2]
        for name, shape in tensor_shapes(options, feature_width, projected, gaussians).items():
            if tensors[name].shape != shape:
                raise WeightsCorrupt(
                    f"ivectors.{name} is {tuple(tensors[name].shape)}", f"config.json makes it {shape}"
                )
        self.options, self.device = options, device
        self.feature_width, self.projected, self.gaussians = feature_width, projected, gaussians
        self.block_frames = block_frames
        self.spliced_frames = options.splice_left_frames + options.splice_right_frames
        """Frames before and after one with which it is spliced."""
        self.newest = newest - options.splice_right_frames
        """Position of the last frame, from a block's first, whose neighbours are known when the block is computed."""
        self.waiting_frames = self.newest + 1
        """Frames whose statistics wait for their weight, from a block's first frame on."""
        if self.waiting_frames <= 0:
            raise WeightsCorrupt("a network that looks ahead less than i-vectors do", "more frames to the right")
        splice = tensors["splice"].float().to(device)
        self._splice, self._splice_offset = splice[:, :-1].t().contiguous(), splice[:, -1].contiguous()
        self._global_mean = tensors["cmvn_mean"].double().to(device)
        self._constants = tensors["ubm.constants"].float().to(device)
        self._ubm = tensors["ubm.weight"].float().t().contiguous().to(device)
        # Rows to look up: one for each Gaussian and number of a projected frame; one for each Gaussian.
        self._projections = tensors["ubm.projections"].float().flatten(0, 1).contiguous().to(device)
        self._scatters = tensors["ubm.scatters"].float().contiguous().to(device)
        self._numbers = torch.arange(projected, device=device)
        self._parts = options.width, options.width * (options.width + 1) // 2, 1
        """Columns of a frame's statistics: linear term, quadratic term, count."""
        rows, columns = torch.tril_indices(options.width, options.width)
        unpacked = torch.zeros(options.width, options.width, dtype=torch.int64)
        unpacked[rows, columns] = unpacked[columns, rows] = torch.arange(len(rows))
        self._unpacked = unpacked.flatten().to(device)
        self._prior = torch.zeros(options.width, dtype=torch.float64, device=device)
        self._prior[0] = options.prior_offset
        self._one = torch.eye(options.width, dtype=torch.float64, device=device)

    def state_specs(self) -> dict[str, StateSpec]:
        options = self.options
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "window": ((options.window_frames, self.feature_width), torch.float32),
            "window_sum": ((self.feature_width,), torch.float64),
            "normalized": ((self.spliced_frames, self.feature_width), torch.float32),
            "statistics": ((self.waiting_frames, sum(self._parts)), torch.float32),
            "count": ((), torch.float64),
            "linear": ((options.width,), torch.float64),
            "quadratic": ((options.width * (options.width + 1) // 2,), torch.float64),
            "ivector": ((options.width,), torch.float32),
        }
        return {name: StateSpec(shape, dtype, None) for name, (shape, dtype) in shapes.items()}

    def initial(self, sessions: int) -> Memory:
        """State of new sessions, but for `window`, which stays where it is."""
        return {
            name: torch.zeros(sessions, *spec.shape, dtype=spec.dtype, device=self.device)
            for name, spec in self.state_specs().items()
            if name != "window"
        }

    # --- frames --------------------------------------------------------------------------------------------

    def normalize(
        self, frames: Tensor, first: Tensor, ends: Tensor, window: Tensor, rows: Tensor, memory: Memory
    ) -> Tensor:
        """Frames less the mean of the window that ends with each; the frames that follow the ones in `memory`.

        Args:
            frames: (sessions, frames, width) raw features.
            first: (sessions,) int64, position of each session's first; those before frame 0 are copies of it.
            ends: (sessions,) int64, frames of the session; those from there on are copies of the last.
            window, rows: the state's tensor and the sessions' rows in it.

        Returns: (sessions, frames, width); before frame 0 and from `ends` on, copies too.
        """
        options, count = self.options, frames.shape[1]
        position = first[:, None] + torch.arange(count, device=frames.device)
        inside = (position >= 0) & (position < ends[:, None])
        slot = position.remainder(options.window_frames)
        leaves = inside & (position >= options.window_frames)
        left = window[rows[:, None], slot]
        added = torch.where(inside[:, :, None], frames, 0.0).double()
        added -= torch.where(leaves[:, :, None], left, 0.0)
        sums = added.cumsum(1) + memory["window_sum"][:, None]
        window[rows[:, None], slot] = torch.where(inside[:, :, None], frames, left)
        memory["window_sum"] = sums[:, -1]
        frames_of_window = (position + 1).clamp(0, options.window_frames)
        of_training = (options.window_frames - frames_of_window).clamp(max=options.global_frames)[:, :, None]
        mean = (sums + of_training * self._global_mean) / (frames_of_window[:, :, None] + of_training)
        return self._held(frames - mean.float(), memory["normalized"][:, -1:], first, ends)

    @staticmethod
    def _held(frames: Tensor, last: Tensor, first: Tensor, ends: Tensor) -> Tensor:
        return hold_ends(torch.cat([last, frames], dim=1), first - 1, ends)[:, 1:]

    def measure(self, raw: Tensor, normalized: Tensor) -> Tensor:
        """Statistics of frames: what each adds to the linear and quadratic terms and to the count.

        Args:
            raw, normalized: (sessions, spliced_frames + frames, width).

        Returns: (sessions, frames, linear + quadratic + 1) float32.
        """
        options = self.options
        sessions, frames = raw.shape[0], raw.shape[1] - self.spliced_frames
        both = torch.cat([raw, normalized])
        # A frame's neighbours lie beside it in memory.
        spliced = both.unfold(1, self.spliced_frames + 1, 1).transpose(2, 3).reshape(2 * sessions * frames, -1)
        projected = torch.addmm(self._splice_offset, spliced, self._splice)
        projected, seen = projected.view(2, sessions * frames, -1)
        scores = torch.addmm(self._constants, torch.cat([seen, seen * seen], dim=1), self._ubm)
        best, gaussians = scores.topk(options.selected_gaussians, dim=1)
        posteriors = (best - best[:, :1]).exp()
        # Kaldi drops Gaussians below a share of the best, then those below that share of what is left.
        posteriors = torch.where(posteriors > options.least_posterior, posteriors, 0.0)
        least = options.least_posterior * posteriors.sum(1, keepdim=True)
        least = torch.minimum(least, posteriors[:, :1])
        posteriors = torch.where(posteriors >= least, posteriors, 0.0)
        posteriors /= posteriors.sum(1, keepdim=True)
        numbers = (gaussians[:, :, None] * self.projected + self._numbers).flatten(1)
        shares = (posteriors[:, :, None] * projected[:, None]).flatten(1)
        linear = F.embedding_bag(numbers, self._projections, mode="sum", per_sample_weights=shares)
        quadratic = F.embedding_bag(gaussians, self._scatters, mode="sum", per_sample_weights=posteriors)
        counts = linear.new_ones(len(linear), 1)
        return torch.cat([linear, quadratic, counts], dim=1).view(sessions, frames, -1)

    # --- statistics ----------------------------------------------------------------------------------------

    def update(self, measured: Tensor, weights: Tensor, later: Tensor, memory: Memory) -> Tensor:
        """Counts a block of frames for good, and estimates the i-vectors.

        Args:
            measured: statistics of the block's new frames, which end `newest` after its first.
            weights: (sessions, block_frames), weights of the block before.
            later: (sessions, waiting_frames), weights of the frames from the block's first on, as if known.

        Returns: (sessions, width) float32, less the prior's mean; also kept in `memory`.
        """
        frames = torch.cat([memory["statistics"], measured], dim=1)
        memory["statistics"] = waiting = frames[:, self.block_frames :]
        linear, quadratic, count = self._sums(frames[:, : self.block_frames], weights)
        memory["linear"] = memory["linear"] + linear
        memory["quadratic"] = memory["quadratic"] + quadratic
        memory["count"] = memory["count"] + count[:, 0]
        linear, quadratic, count = self._sums(waiting, later)
        estimate = self._solve(
            memory["linear"] + linear, memory["quadratic"] + quadratic, memory["count"] + count[:, 0]
        )
        memory["ivector"] = estimate
        return estimate

    def _sums(self, statistics: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted sums over frames, float64: linear (sessions, width), quadratic (sessions, lower triangle) and
        count (sessions, 1)."""
        scaled = (weights * self.options.posterior_scale)[:, None]
        sums = torch.bmm(scaled, statistics)[:, 0].double()
        linear, quadratic, _ = self._parts
        return sums[:, :linear], sums[:, linear : linear + quadratic], sums[:, -1:]

    def _solve(self, linear: Tensor, quadratic: Tensor, counts: Tensor) -> Tensor:
        prior_scale = (counts / self.options.most_counts).clamp(min=1)
        matrix = (
            quadratic[:, self._unpacked].view(len(counts), *self._one.shape) + prior_scale[:, None, None] * self._one
        )
        right = linear + prior_scale[:, None] * self._prior
        solution: Tensor = torch.linalg.solve_ex(matrix, right)[0]
        return (solution - self._prior).float()


def hold_ends(frames: Tensor, first: Tensor, ends: Tensor) -> Tensor:
    """Frames with copies of a session's first frame before it and of its last after it.

    Args:
        frames: (sessions, frames, width).
        first: (sessions,) int64, position of each session's first of them; below 0 before the session's start.
        ends: (sessions,) int64, frames of the session. Its last frame, or the one before `frames[:, 0]`, must be
            among them, and so must frame 0 where `first` is below it.
    """
    position = torch.arange(frames.shape[1], device=frames.device)
    lowest, highest = (-first).clamp(min=0)[:, None], (ends - 1 - first).clamp(min=0)[:, None]
    held = torch.minimum(torch.maximum(position, lowest), highest)
    return frames.gather(1, held[:, :, None].expand(-1, -1, frames.shape[2]))
