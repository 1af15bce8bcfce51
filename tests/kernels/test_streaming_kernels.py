"""The kernels of streaming encoders do what a plain loop over a whole session does.

In torch and on every instruction set, wherever sessions stand, whoever stands beside them, and whatever lies where
nobody has written.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from asr_serve.kernels import reference

NAN = float("nan")
HEADS, SLOTS = 3, 4
I64 = torch.int64


def expect_close(came: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """fp32 to a few last digits; bf16 to one rounding."""
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2**-8, 2**-10)
    torch.testing.assert_close(came.double(), expected.double(), rtol=rtol, atol=atol)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def below(limit: int) -> int:
    return int(torch.randint(limit, ()))


def ints(*values: int, dtype: torch.dtype = I64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def shifted(scores: Tensor, columns: int) -> Tensor:
    """Row e of (n, heads, E, width) from E - 1 - e on: how scores by distance become scores by place, uncopied."""
    n, heads, steps, _ = scores.shape
    rows, apart, along, _ = scores.stride()
    start = scores.storage_offset() + steps - 1
    return scores.as_strided((n, heads, steps, columns), (rows, apart, along - 1, 1), start)


# --- window_attention -----------------------------------------------------------------------------


class Shape(NamedTuple):
    block: int
    steps: int
    left: int
    head_dim: int
    spare: int = 0
    """Frames that the ring holds more than it must."""


SHAPES = [
    Shape(1, 1, 5, 8),
    Shape(1, 3, 9, 36, spare=2),
    Shape(2, 2, 7, 5, spare=1),
    Shape(2, 14, 70, 64),
    Shape(4, 4, 8, 64, spare=3),
    Shape(7, 14, 16, 24),
    Shape(14, 14, 0, 40),
    Shape(3, 12, 0, 20, spare=7),
]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, at: int, bias: Tensor | None, shape: Shape) -> Tensor:
    """In float64: frames `at` .. of a session whose keys and values so far are k, v (frames, heads, head_dim); q
    has the frames there are."""
    out = torch.zeros(len(q), HEADS, shape.head_dim, dtype=torch.float64)
    for e in range(len(q)):
        block = (at + e) // shape.block * shape.block
        begin, end = max(0, block - shape.left), min(block + shape.block, len(k))
        for head in range(HEADS):
            scores = k[begin:end, head].double() @ q[e, head].double()
            if bias is not None:
                scores += bias[head, e, begin - at + shape.left : end - at + shape.left].double()
            out[e, head] = torch.softmax(scores * shape.head_dim**-0.5, 0) @ v[begin:end, head].double()
    return out.flatten(1)


class Rings:
    """Keys and values of SLOTS sessions, NaN wherever nobody has written, and beside them all that was put in."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        capacity = shape.left + shape.steps + shape.spare
        self.keys, self.values = torch.full((2, SLOTS + 1, HEADS, capacity, shape.head_dim), NAN, dtype=dtype)
        self.said: list[Tensor] = [self.nothing()] * SLOTS

    def nothing(self) -> Tensor:
        return torch.empty(0, 2, HEADS, self.shape.head_dim, dtype=self.dtype)

    def step(
        self, any_kernels: ModuleType, slots: list[int], frames: list[int], biased: bool, mixed: bool = False
    ) -> Tensor:
        """A step of these sessions and of two rows that only fill up, against the plain loop."""
        n, shape = len(slots) + 2, self.shape
        q, k, v = qkv = normal(n, shape.steps, 3, HEADS, shape.head_dim, dtype=self.dtype).unbind(2)
        rows = ints(*slots, SLOTS, SLOTS)
        seen = ints(*(len(self.said[slot]) for slot in slots), 0, 0)
        live = ints(*frames, 0, 0)
        columns = shape.left + shape.steps
        bias = shifted(normal(n, HEADS, shape.steps, columns + shape.steps - 1), columns) * 2 if biased else None
        if bias is not None and not mixed:
            bias = shifted(normal(n, HEADS, shape.steps, columns + shape.steps - 1, dtype=self.dtype), columns)
        for row in range(n):
            for part in qkv:
                part[row, int(live[row]) :] = NAN
        out = torch.full((n, shape.steps, HEADS * shape.head_dim), NAN, dtype=self.dtype)
        any_kernels.window_attention(
            q, k, v, self.keys, self.values, rows, seen, live, bias, shape.left, shape.block, out
        )
        for row, (slot, count) in enumerate(zip(slots, frames, strict=True)):
            self.said[slot] = torch.cat([self.said[slot], torch.stack([k, v], 2)[row, :count]])
            past, at = self.said[slot], int(seen[row])
            own = None if bias is None else bias[row]
            expected = plain_attention(q[row, :count], past[:, 0], past[:, 1], at, own, shape)
            expect_close(out[row, :count], expected, self.dtype)
            assert not out[row, count:].any(), "past its end a row is zero"
        assert not out[-2:].any()
        return out


def fill(shape: Shape) -> int:
    """How many frames the last chunk of a session has."""
    return below(shape.steps + 1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_attention_is_that_of_a_loop_over_the_whole_session(any_kernels, dtype, shape, biased):
    """Sessions join, go past the end of the ring, end within a chunk, and leave their rows as they are."""
    rings = Rings(shape, dtype)
    wraps = 0
    for _ in range(40):
        slots = torch.randperm(SLOTS)[: 1 + below(SLOTS)].tolist()
        frames = [shape.steps if below(12) else fill(shape) for _ in slots]
        rings.step(any_kernels, slots, frames, biased)
        for slot, count in zip(slots, frames, strict=True):
            wraps += len(rings.said[slot]) > rings.keys.shape[2]
            if count < shape.steps:
                rings.said[slot] = rings.nothing()
    assert wraps
    assert rings.keys[SLOTS].isnan().all(), "rows that fill up write nothing"
    assert rings.values[SLOTS].isnan().all()


def test_the_ring_holds_each_frame_at_its_place(any_kernels, dtype):
    shape = Shape(2, 4, 6, 8, spare=1)
    rings = Rings(shape, dtype)
    for frames in (4, 4, 4, 2):
        rings.step(any_kernels, [1], [frames], False)
    said, capacity = rings.said[1], rings.keys.shape[2]
    for frame in range(14 - capacity, 14):
        assert torch.equal(rings.keys[1, :, frame % capacity], said[frame, 0])
        assert torch.equal(rings.values[1, :, frame % capacity], said[frame, 1])
    assert rings.keys[[0, 2, 3]].isnan().all(), "rows of others are left alone"


def test_positions_far_into_a_session(any_kernels):
    """Ten years of frames of 10 ms, and the same frames at the start of a session: one result."""
    shape, results = Shape(2, 4, 6, 8), []
    q, k, v = normal(3, 1, 4, HEADS, 8)
    past = normal(2, HEADS, 6, 8)
    for seen in (10, 10 + 10 * 3_153_600_000):
        keys, values = torch.full((2, 2, HEADS, 10, 8), NAN)
        for frame in range(6):
            for ring, part in ((keys, past[0]), (values, past[1])):
                ring[0, :, (seen - 6 + frame) % 10] = part[:, frame]
        out = torch.empty(1, 4, HEADS * 8)
        places = ints(0), ints(seen), ints(4)
        any_kernels.window_attention(q, k, v, keys, values, *places, None, shape.left, shape.block, out)
        results.append(out)
    assert torch.equal(*results)


def test_scores_may_be_added_in_float32_to_bf16(any_kernels):
    rings = Rings(Shape(2, 4, 7, 16), torch.bfloat16)
    for _ in range(5):
        rings.step(any_kernels, [2, 0], [4, 4], True, mixed=True)


def run_session(any_kernels: ModuleType, qkv: Tensor, by_distance: Tensor, chunk: int, left: int) -> Tensor:
    """A session of blocks of two, `chunk` frames a step; `by_distance` (1, heads, frames, distances)."""
    frames, heads, head_dim = qkv.shape[1], qkv.shape[3], qkv.shape[4]
    keys, values = torch.full((2, 2, heads, left + chunk, head_dim), NAN, dtype=qkv.dtype)
    pieces = []
    for at in range(0, frames, chunk):
        q, k, v = qkv[:, at : at + chunk].unbind(2)
        scores = by_distance[:, :, at : at + chunk]
        middle = by_distance.shape[3] // 2 - left
        bias = shifted(scores[..., middle - chunk + 1 :], left + chunk)
        out = torch.empty(1, chunk, heads * head_dim, dtype=qkv.dtype)
        places = ints(0), ints(at), ints(chunk)
        any_kernels.window_attention(q, k, v, keys, values, *places, bias, left, 2, out)
        pieces.append(out)
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("head_dim", [20, 64])
def test_the_length_of_chunks_changes_nothing(any_kernels, dtype, head_dim):
    frames, left = 84, 9
    qkv = normal(1, frames, 3, HEADS, head_dim, dtype=dtype)
    by_distance = normal(1, HEADS, frames, 80, dtype=dtype)
    by_two, *others = (run_session(any_kernels, qkv, by_distance, chunk, left) for chunk in (2, 4, 6, 12, 14, 28))
    for other in others:
        if any_kernels is reference:
            expect_close(other, by_two, dtype)
        else:
            assert torch.equal(other, by_two), "bit for bit"


def test_neighbours_and_threads_change_nothing(core, dtype):
    shape = Shape(2, 4, 8, 36)
    q, k, v = normal(5, 4, 3, HEADS, 36, dtype=dtype).unbind(2)
    state = normal(2, 6, HEADS, 12, 36, dtype=dtype)
    rows, seen, live = ints(4, 2, 0, 1, 3), ints(0, 8, 30, 400, 6), ints(4, 3, 4, 1, 4)
    results = []
    try:
        for threads, groups in ((1, [slice(0, 5)]), (2, [slice(0, 5)]), (1, [slice(i, i + 1) for i in range(5)])):
            core.set_threads(threads)
            keys, values = state.clone()
            out = torch.empty(5, 4, HEADS * 36, dtype=dtype)
            for g in groups:
                places = rows[g], seen[g], live[g]
                core.window_attention(q[g], k[g], v[g], keys, values, *places, None, 8, 2, out[g])
            results.append((keys, values, out))
    finally:
        core.set_threads(torch.get_num_threads())
    assert shape.left + shape.steps == state.shape[3]
    for other in results[1:]:
        for came, expected in zip(other, results[0], strict=True):
            assert torch.equal(came, expected)


def test_any_layout_with_contiguous_heads_is_valid(any_kernels, dtype):
    """Queries with the heads outside, one layer of a state of many, part of something wider, one bias for all."""
    n, steps, left, head_dim = 3, 4, 6, 12
    plain = [normal(n, steps, HEADS, head_dim, dtype=dtype) for _ in range(3)]
    odd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
    rings = normal(2, SLOTS + 1, HEADS, left + steps, head_dim, dtype=dtype)
    layers = torch.full((SLOTS + 1, 2, 3, left + steps, HEADS, head_dim), NAN, dtype=dtype)
    layers[:, :, 1] = rings.permute(1, 0, 3, 2, 4)
    keys, values = layers[:, :, 1].transpose(2, 3).unbind(1)
    one = normal(left + steps, steps, dtype=dtype).T
    bias = one.expand(n, HEADS, steps, left + steps)
    places = ints(2, 0, 3), ints(8, 0, 80), ints(4, 2, 3)
    expected = torch.empty(n, steps, HEADS * head_dim, dtype=dtype)
    reference.window_attention(*plain, *rings, *places, bias.contiguous(), left, 2, expected)
    wider = torch.full((n, steps, HEADS * head_dim + 5), 7.0, dtype=dtype)
    any_kernels.window_attention(*odd, keys, values, *places, bias, left, 2, wider[..., :-5])
    expect_close(wider[..., :-5], expected, dtype)
    assert (wider[..., -5:] == 7).all()
    assert torch.equal(keys, rings[0])
    assert torch.equal(values, rings[1])
    assert layers[:, :, [0, 2]].isnan().all(), "other layers are left alone"


def test_the_core_equals_the_reference_at_the_size_of_a_model(core, dtype):
    n, steps, left, heads, head_dim = 6, 14, 70, 8, 64
    q, k, v = normal(n, steps, 3, heads, head_dim, dtype=dtype).unbind(2)
    state = normal(2, n + 1, heads, left + steps, head_dim, dtype=dtype)
    bias = shifted(normal(n, heads, steps, left + 2 * steps - 1, dtype=dtype) * 4, left + steps)
    places = torch.randperm(n), ints(0, 14, 70, 84, 98, 14_000), ints(14, 14, 9, 14, 0, 1)
    results = []
    for any_kernels in (core, reference):
        keys, values = state.clone()
        out = torch.full((n, steps, heads * head_dim), NAN, dtype=dtype)
        any_kernels.window_attention(q, k, v, keys, values, *places, bias, left, 14, out)
        results.append((keys, values, out))
    for ours, theirs in zip(*results, strict=True):
        expect_close(ours, theirs, dtype)


# --- causal_conv ----------------------------------------------------------------------------------


class Tails:
    """Tails of SLOTS sessions, and beside them all that was put in. Nobody's row is NaN."""

    def __init__(self, channels: int, taps: int, dtype: torch.dtype) -> None:
        self.dtype, self.taps, self.channels = dtype, taps, channels
        self.tail = torch.full((SLOTS + 1, taps - 1, channels), NAN, dtype=dtype)
        self.weight, self.bias = normal(channels, taps, dtype=dtype), normal(channels, dtype=dtype)
        self.said: list[Tensor] = []
        for slot in range(SLOTS):
            self.said.append(torch.empty(0))
            self.join(slot)

    def join(self, slot: int) -> None:
        self.tail[slot] = 0
        self.said[slot] = torch.zeros(self.taps - 1, self.channels, dtype=self.dtype)

    def step(self, any_kernels: ModuleType, slots: list[int], frames: list[int], steps: int, biased: bool) -> None:
        n = len(slots) + 2
        x = normal(n, steps, 2 * self.channels, dtype=self.dtype)[..., : self.channels]
        live = ints(*frames, 0, 0)
        for row in range(n):
            x[row, int(live[row]) :] = NAN
        before, out = self.tail.clone(), torch.full((n, steps, self.channels), NAN, dtype=self.dtype)
        bias = self.bias if biased else None
        any_kernels.causal_conv(x, self.weight, bias, self.tail, ints(*slots, SLOTS, SLOTS), live, out)
        for row, (slot, count) in enumerate(zip(slots, frames, strict=True)):
            self.said[slot] = said = torch.cat([self.said[slot], x[row, :count]])
            for e in range(count):
                window = said[len(said) - count + e + 1 - self.taps :][: self.taps]
                expected = (window.double() * self.weight.T.double()).sum(0)
                expect_close(out[row, e], expected + self.bias.double() if biased else expected, self.dtype)
            assert torch.equal(self.tail[slot], said[len(said) - self.taps + 1 :])
        untouched = [slot for slot in range(SLOTS) if slot not in slots]
        assert torch.equal(self.tail[untouched], before[untouched])
        assert self.tail[SLOTS].isnan().all(), "rows that fill up write nothing"


@pytest.mark.slow
@pytest.mark.parametrize("taps", [1, 2, 9, 31])
@pytest.mark.parametrize(("channels", "steps"), [(5, 1), (64, 4), (100, 7), (192, 2)])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_a_convolution_is_that_over_the_whole_session(any_kernels, dtype, taps, channels, steps, biased):
    tails = Tails(channels, taps, dtype)
    for _ in range(12):
        slots = torch.randperm(SLOTS)[: 1 + below(SLOTS)].tolist()
        frames = [steps if below(6) else below(steps + 1) for _ in slots]
        tails.step(any_kernels, slots, frames, steps, biased)
        for slot, count in zip(slots, frames, strict=True):
            if count < steps:
                tails.join(slot)


def test_the_length_of_the_chunks_of_a_convolution_changes_nothing(core, dtype):
    frames, channels, taps = 24, 70, 9
    x, weight, bias = (normal(*s, dtype=dtype) for s in ((1, frames, channels), (channels, taps), (channels,)))
    results = []
    for chunk in (1, 2, 3, 4, 6, 12, 24):
        tail = torch.zeros(2, taps - 1, channels, dtype=dtype)
        out = torch.empty_like(x)
        for at in range(0, frames, chunk):
            part = slice(at, at + chunk)
            core.causal_conv(x[:, part], weight, bias, tail, ints(0), ints(chunk), out[:, part])
        results.append((out, tail))
    for out, tail in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(tail, results[0][1])


def test_weights_may_lie_the_other_way_and_tails_beside_others(any_kernels, dtype):
    x, weight = normal(2, 3, 6, dtype=dtype), normal(6, 4, dtype=dtype)
    states = normal(SLOTS + 1, 2, 3, 6, dtype=dtype)
    expected_tail, beside = states[:, 1].clone(), states[:, 0].clone()
    expected, wider = torch.empty_like(x), torch.full((2, 3, 8), 7.0, dtype=dtype)
    reference.causal_conv(x, weight, None, expected_tail, ints(3, 1), ints(3, 2), expected)
    other_way = weight.T.contiguous().T
    any_kernels.causal_conv(x, other_way, None, states[:, 1], ints(3, 1), ints(3, 2), wider[..., :6])
    expect_close(wider[..., :6], expected, dtype)
    assert (wider[..., 6:] == 7).all()
    assert torch.equal(states[:, 1], expected_tail)
    assert torch.equal(states[:, 0], beside)


def test_threads_change_no_convolution(core):
    x, weight = normal(9, 5, 130), normal(130, 9)
    state, results = normal(10, 8, 130), []
    try:
        for threads in (1, 2, 5):
            core.set_threads(threads)
            tail, out = state.clone(), torch.empty_like(x)
            core.causal_conv(x, weight, None, tail, torch.randperm(9).sort().values, torch.full((9,), 5), out)
            results.append(torch.cat([out.flatten(), tail.flatten()]))
    finally:
        core.set_threads(torch.get_num_threads())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# --- what crosses, and what is refused ------------------------------------------------------------


def test_a_tensor_crosses_without_a_copy(core, dtype):
    state = torch.zeros(5, 2, 3, 8, dtype=dtype)
    for view in (state, state[2:], state[:, 1], state[..., 3:], state.transpose(1, 2), state.expand(2, 5, 2, 3, 8)):
        assert core.address(view) == view.data_ptr()
    with torch.inference_mode():
        fresh = torch.zeros(4)
        assert core.address(fresh) == fresh.data_ptr()


def attention(**changes: object) -> list[object]:
    """Arguments of one good call, but for these."""
    good: dict[str, object] = {name: torch.zeros(2, 4, 3, 8) for name in "qkv"}
    good |= {name: torch.zeros(5, 3, 10, 8) for name in ("keys", "values")}
    good |= {"rows": ints(0, 4), "seen": ints(8, 0), "frames": ints(4, 0), "bias": torch.zeros(2, 3, 4, 10)}
    good |= {"left": 6, "block": 2, "out": torch.zeros(2, 4, 24)}
    return list((good | changes).values())


def conv(**changes: object) -> list[object]:
    good: dict[str, object] = {"x": torch.zeros(2, 4, 6), "weight": torch.zeros(6, 3), "bias": torch.zeros(6)}
    good |= {"tail": torch.zeros(5, 2, 6), "rows": ints(0, 4), "frames": ints(4, 0)}
    return list((good | {"out": torch.zeros(2, 4, 6)} | changes).values())


WRONG = {
    "attention: row past the state": ("a row outside", attention(rows=ints(0, 5))),
    "attention: negative row": ("a row outside", attention(rows=ints(-1, 4))),
    "attention: int32 rows": ("incompatible|dtype", attention(rows=ints(0, 4, dtype=torch.int32))),
    "attention: a row too few": ("must be \\(n,\\)", attention(rows=ints(0))),
    "attention: one seen for two": ("must be \\(n,\\)", attention(seen=ints(8))),
    "attention: seen within a block": ("multiple of block", attention(seen=ints(7, 0))),
    "attention: negative seen": ("multiple of block", attention(seen=ints(-2, 0))),
    "attention: greatest seen": ("multiple of block", attention(seen=ints(2**63 - 2, 0))),
    "attention: more frames than E": ("more frames", attention(frames=ints(5, 0))),
    "attention: negative frames": ("more frames", attention(frames=ints(4, -1))),
    "attention: E of half a block": ("multiple of block", attention(block=3)),
    "attention: block 0": ("multiple of block", attention(block=0)),
    "attention: short ring": ("ring must hold", attention(left=7, bias=None)),
    "attention: negative left": ("ring must hold", attention(left=-1, bias=None)),
    "attention: greatest left": ("ring must hold", attention(left=2**63 - 1, bias=None)),
    "attention: mixed dtypes": ("one dtype", attention(k=torch.zeros(2, 4, 3, 8).bfloat16())),
    "attention: state of another dtype": ("one dtype", attention(values=torch.zeros(5, 3, 10, 8).bfloat16())),
    "attention: float16": ("dtype must be", [x.half() if isinstance(x, Tensor) and x.is_floating_point() else x
                                for x in attention()]),
    "attention: bias of another dtype": ("bias must be", attention(bias=torch.zeros(2, 3, 4, 10).bfloat16())),
    "attention: bias too narrow": ("bias must be", attention(bias=torch.zeros(2, 3, 4, 9))),
    "attention: other head_dim": ("k, v must be", attention(v=torch.zeros(2, 4, 3, 4))),
    "attention: fewer frames of k": ("k, v must be", attention(k=torch.zeros(2, 2, 3, 8))),
    "attention: q apart": ("contiguous along", attention(q=torch.zeros(2, 4, 3, 16)[..., ::2])),
    "attention: state apart": ("contiguous along", attention(keys=torch.zeros(5, 3, 8, 10).transpose(2, 3))),
    "attention: states of two lengths": ("keys, values", attention(values=torch.zeros(5, 3, 11, 8))),
    "attention: states of other heads": ("keys, values", attention(keys=torch.zeros(5, 2, 10, 8))),
    "attention: narrow out": ("out must be", attention(out=torch.zeros(2, 4, 16))),
    "attention: q of three dimensions": ("q must be", attention(q=torch.zeros(2, 4, 24))),
    "attention: no tensor": ("incompatible|dtype", attention(keys=[0.0])),
    "conv: row past the state": ("a row outside", conv(rows=ints(0, 5))),
    "conv: negative row": ("a row outside", conv(rows=ints(-1, 4))),
    "conv: more frames than E": ("more frames", conv(frames=ints(5, 0))),
    "conv: one count for two": ("must be \\(n,\\)", conv(frames=ints(4))),
    "conv: mixed dtypes": ("one dtype", conv(bias=torch.zeros(6).bfloat16())),
    "conv: float64": ("dtype", [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
                                for x in conv()]),
    "conv: fewer weights": ("weight must be", conv(weight=torch.zeros(5, 3))),
    "conv: no taps": ("weight", conv(weight=torch.zeros(6, 0))),
    "conv: bias of other channels": ("bias must be", conv(bias=torch.zeros(5))),
    "conv: tail of other taps": ("tail must be", conv(tail=torch.zeros(5, 3, 6))),
    "conv: tail apart": ("tail must be", conv(tail=torch.zeros(5, 6, 2).transpose(1, 2))),
    "conv: x apart": ("x and out", conv(x=torch.zeros(2, 6, 4).transpose(1, 2))),
    "conv: short out": ("x and out", conv(out=torch.zeros(2, 3, 6))),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_invalid_shapes_are_refused_and_nothing_is_written(core, case):
    says, arguments = WRONG[case]
    before = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    with pytest.raises((ValueError, TypeError), match=says):
        (core.window_attention if case.startswith("attention") else core.causal_conv)(*arguments)
    for old, new in zip(before, arguments, strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new


def test_the_arguments_that_the_refusals_change_are_valid(any_kernels):
    any_kernels.window_attention(*attention())
    any_kernels.window_attention(*attention(bias=None, seen=ints(8, 1)))  # who fills up stands nowhere
    any_kernels.causal_conv(*conv())
    any_kernels.causal_conv(*conv(bias=None))


def test_a_step_without_rows_does_nothing(any_kernels):
    empty = {name: torch.zeros(0, 4, 3, 8) for name in "qkv"} | {name: ints() for name in ("rows", "seen", "frames")}
    any_kernels.window_attention(*attention(**empty, bias=None, out=torch.zeros(0, 4, 24)))
    nobody = {name: torch.zeros(0, 4, 6) for name in ("x", "out")} | {name: ints() for name in ("rows", "frames")}
    any_kernels.causal_conv(*conv(**nobody))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_can_record_the_references():
    """Recorded once, over rows that only fill up; then the same graph runs other sessions."""
    shape, n, channels, taps = Shape(2, 4, 6, 16), 3, 24, 9
    q, k, v = torch.zeros(3, n, 4, HEADS, 16)
    rings, tail = torch.zeros(2, SLOTS + 1, HEADS, 10, 16), torch.zeros(SLOTS + 1, taps - 1, channels)
    x, weight = torch.zeros(n, 4, channels), normal(channels, taps)
    places = torch.full((n,), SLOTS), ints(0, 0, 0), ints(0, 0, 0)
    out, mixed = torch.zeros(n, 4, HEADS * 16), torch.zeros(n, 4, channels)
    host = [q, k, v, *rings, *places, out, x, weight, tail, mixed]
    card = [part.cuda() for part in host]

    def both(q, k, v, keys, values, rows, seen, live, out, x, weight, tail, mixed):
        reference.window_attention(q, k, v, keys, values, rows, seen, live, None, shape.left, shape.block, out)
        reference.causal_conv(x, weight, None, tail, rows, live, mixed)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        both(*card)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both(*card)
    for step in range(6):
        given = [normal(*part.shape) for part in (q, k, v)]
        given += [ints(2, SLOTS, 0), ints(4 * step, 0, 8 * step), ints(4, 0, 4), normal(*x.shape)]
        for at, value in zip((0, 1, 2, 5, 6, 7, 9), given, strict=True):
            host[at].copy_(value)
            card[at].copy_(value)
        both(*host)
        graph.replay()
        for name, ours, theirs in zip("kvotm", [card[i] for i in (3, 4, 8, 11, 12)],
                                      [host[i] for i in (3, 4, 8, 11, 12)], strict=True):  # fmt: skip
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4, msg=name)
