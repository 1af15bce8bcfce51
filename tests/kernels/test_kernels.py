"""Every native kernel equals its reference in torch, on every instruction set this CPU has, and never crashes."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch
from torch import Tensor

from asr_serve import kernels as native
from asr_serve.kernels import PAGE, reference, voice_activity_reference
from asr_serve.kernels.paging import split_int8_pool, zero_unused
from asr_serve.models.packing import PagedKeyValues

HEAD_DIMS = (8, 36, 52, 64)
DTYPES = (torch.float32, torch.bfloat16)
HEADS, LAYERS, PAGES = 3, 2, 24
NAN = float("nan")


def expect_close(came: Tensor, expected: Tensor, dtype: torch.dtype, fp32: float = 2e-6) -> None:
    """fp32 to a few last digits; bf16 to one rounding, 2^-8 of the value."""
    rtol, atol = (fp32, fp32) if dtype == torch.float32 else (2**-7, 2**-9)
    torch.testing.assert_close(came.float(), expected.float(), rtol=rtol, atol=atol)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def poisoned_pool(head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.full((PAGES, LAYERS, 2, HEADS, head_dim * PAGE), NAN, dtype=dtype)


def tables_of(lengths: list[int], spare: int = 1) -> Tensor:
    """Distinct pages for every row, in no order; entries past a row's end point nowhere."""
    pages = (1 + torch.randperm(PAGES - 1)).tolist()
    width = max(-(-n // PAGE) for n in lengths) + spare
    tables = torch.full((len(lengths), width), -(2**31), dtype=torch.int32)
    for row, length in enumerate(lengths):
        for entry in range(-(-length // PAGE)):
            tables[row, entry] = pages.pop()
    return tables


def filled(head_dim: int, dtype: torch.dtype, lengths: list[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A pool that holds NaN wherever `lengths` does not reach, its tables, and what each row holds."""
    pool, tables = poisoned_pool(head_dim, dtype), tables_of(lengths)
    held = [normal(n, LAYERS, 2, HEADS * head_dim, dtype=dtype) for n in lengths]
    for row, kv in enumerate(held):
        reference.store(pool, kv, tables[row])
    return pool, tables, held


LENGTHS = [1, 15, 16, 17, 33, 80, 2]


# --- the reference against plain torch ----------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_reference_attention_is_that_of_torch(head_dim):
    pool, tables, held = filled(head_dim, torch.float32, LENGTHS)
    q = normal(len(LENGTHS), HEADS * head_dim)
    for layer in range(LAYERS):
        out = torch.full_like(q, NAN)
        reference.attend(pool, layer, q, out, tables, torch.tensor(LENGTHS), head_dim**-0.5)
        for row, kv in enumerate(held):
            k, v = kv[:, layer].view(-1, 2, HEADS, head_dim).permute(1, 2, 0, 3)
            query = q[row].view(HEADS, 1, head_dim)
            expected = torch.nn.functional.scaled_dot_product_attention(query[None], k[None], v[None])
            torch.testing.assert_close(out[row], expected.flatten(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0, 1, 5, 16, 33])
def test_the_reference_attention_of_groups_and_windows_is_that_of_torch(window):
    head_dim, group = 16, 4
    pool, tables, held = filled(head_dim, torch.float32, LENGTHS)
    q = normal(len(LENGTHS), group * HEADS * head_dim)
    out = torch.full_like(q, NAN)
    reference.attend(pool, 1, q, out, tables, torch.tensor(LENGTHS), 0.3, window)
    for row, kv in enumerate(held):
        k, v = kv[-window:, 1].view(-1, 2, HEADS, head_dim).permute(1, 2, 0, 3)
        query = q[row].view(1, group * HEADS, 1, head_dim)
        expected = torch.nn.functional.scaled_dot_product_attention(query, k[None], v[None], scale=0.3, enable_gqa=True)
        torch.testing.assert_close(out[row], expected.flatten(), rtol=1e-5, atol=1e-5)


def test_the_reference_softmax_is_that_of_torch_over_the_live_keys():
    scores = normal(2, HEADS, 5, 7)
    expected = torch.softmax(scores * 0.3, -1), torch.softmax(scores[1, ..., :3] * 0.3, -1)
    scores[1, ..., 3:] = 1e30
    reference.softmax(scores, torch.tensor([7, 3]), 0.3)
    torch.testing.assert_close(scores[0], expected[0][0])
    torch.testing.assert_close(scores[1, ..., :3], expected[1])
    assert not scores[1, ..., 3:].any()


def test_the_reference_rope_is_a_rotation():
    qkv, angles = normal(4, 3, HEADS, 8), torch.rand(10, 3) * 6
    before = qkv.clone()
    positions = torch.tensor([0, 3, 9, 3])
    reference.rope(qkv, positions, angles.cos(), angles.sin())
    pairs, old = (torch.complex(x[:, :2, :, :3], x[:, :2, :, 3:6]) for x in (qkv, before))
    turn = torch.polar(torch.ones(4, 3), angles[positions])[:, None, None]
    torch.testing.assert_close(pairs, old * turn)
    assert torch.equal(qkv[:, 2], before[:, 2]), "values are not turned"
    assert torch.equal(qkv[..., 6:], before[..., 6:]), "what is not rotated stays"


def test_the_reference_lstm_is_that_of_torch():
    expected_lstm = torch.nn.LSTM(8, 12)
    x, h, c = normal(9, 8), normal(1, 1, 12), normal(1, 1, 12)
    with torch.no_grad():
        expected, (last_h, last_c) = expected_lstm(x[:, None], (h, c))
        bias = expected_lstm.bias_ih_l0 + expected_lstm.bias_hh_l0
        gates = x @ expected_lstm.weight_ih_l0.T + bias
        ours_h, ours_c, out = h[0].clone(), c[0].clone(), torch.empty(9, 12)
        weight = expected_lstm.weight_hh_l0.T.contiguous()
        reference.lstm(gates, weight, torch.tensor([0]), torch.tensor([9]), ours_h, ours_c, out)
    torch.testing.assert_close(out, expected[:, 0])
    torch.testing.assert_close(ours_h, last_h[0])
    torch.testing.assert_close(ours_c, last_c[0])


def test_pick_is_the_argmax_and_its_log_probability():
    logits = normal(6, 300) * 3
    tokens, logprobs = torch.empty(6, dtype=torch.int64), torch.empty(6)
    reference.pick(logits, normal(6, 4), normal(300, 4), tokens, logprobs)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).amax(-1))


# --- native against the reference ---------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rope(core, dtype, head_dim):
    half = int(head_dim * 0.9) // 2
    angles = torch.rand(50, half) * 6
    ours = normal(11, 3, HEADS, head_dim, dtype=dtype)
    theirs, positions = ours.clone(), torch.randint(0, 50, (11,))
    core.rope(ours, positions, angles.cos(), angles.sin())
    reference.rope(theirs, positions, angles.cos(), angles.sin())
    expect_close(ours, theirs, dtype)
    assert torch.equal(ours[:, 2], theirs[:, 2])


@pytest.mark.parametrize("keys", [1, 7, 16, 64, 333])
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_softmax(core, dtype, keys, scale):
    ours = (normal(3, HEADS, 37, keys) * 8).to(dtype)
    lengths = torch.tensor([keys, max(1, keys // 2), 1])
    for row, length in enumerate(lengths):
        ours[row, ..., length:] = NAN
    theirs = ours.clone()
    core.softmax(ours, lengths, scale)
    reference.softmax(theirs, lengths, scale)
    expect_close(ours, theirs, dtype)
    for row, length in enumerate(lengths):
        assert not ours[row, ..., length:].any()


def test_softmax_of_far_apart_scores(core, dtype):
    ours = torch.tensor([[-3e38, 0.0, 3e38], [3e4, -3e4, 3e4], [-1e30, -1e30, -1e30]]).to(dtype)[:, None, None]
    core.softmax(ours, torch.tensor([3, 3, 3]), 1.0)
    expected = torch.tensor([[0, 0, 1], [0.5, 0, 0.5], [1 / 3, 1 / 3, 1 / 3]])
    expect_close(ours[:, 0, 0], expected, dtype)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_store(core, dtype, head_dim):
    for frames in (1, 15, 16, 17, 70):
        ours, table = poisoned_pool(head_dim, dtype), tables_of([frames])[0]
        theirs, kv = ours.clone(), normal(frames, LAYERS, 2, HEADS * head_dim, dtype=dtype)
        core.store(ours, kv, table)
        reference.store(theirs, kv, table)
        assert torch.equal(ours.isnan(), theirs.isnan()), "nothing is written where nothing belongs"
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_store_reads_a_slice_of_a_batch(core, dtype):
    ours, table = poisoned_pool(8, dtype), tables_of([20])[0]
    theirs, batch = ours.clone(), normal(60, LAYERS, 2, HEADS * 8, dtype=dtype)
    core.store(ours, batch[17:37], table)
    reference.store(theirs, batch[17:37], table)
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_append(core, dtype, head_dim):
    ours, tables, _ = filled(head_dim, dtype, LENGTHS)
    theirs, qkv = ours.clone(), normal(len(LENGTHS), 3, HEADS * head_dim, dtype=dtype)
    positions = torch.tensor([n - 1 for n in LENGTHS])
    for layer in range(LAYERS):
        core.append(ours, layer, qkv, tables, positions)
        reference.append(theirs, layer, qkv, tables.clamp(min=0), positions)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("draw", range(3))
def test_attend(core, dtype, head_dim, draw):
    torch.manual_seed(draw)
    lengths = torch.randint(1, 64, (5,)).tolist()
    pool, tables, _ = filled(head_dim, dtype, lengths)
    fused = normal(5, 3 * HEADS * head_dim, dtype=dtype)
    q = fused[:, : HEADS * head_dim]  # the engine hands in a slice
    for layer in range(LAYERS):
        ours, theirs = (torch.full((5, HEADS * head_dim), NAN, dtype=dtype) for _ in range(2))
        core.attend(pool, layer, q, ours, tables, torch.tensor(lengths), head_dim**-0.5)
        reference.attend(pool, layer, q, theirs, tables, torch.tensor(lengths), head_dim**-0.5)
        assert not ours.isnan().any(), "poison in unused pages or slots got through"
        expect_close(ours, theirs, dtype, fp32=1e-5)


@pytest.mark.parametrize("head_dim", [20, 64, 128, 256])
@pytest.mark.parametrize(("group", "window"), [(2, 0), (1, 20), (4, 1), (3, 16), (2, 33), (1, 1_000)])
def test_attend_with_groups_and_windows(core, dtype, head_dim, group, window):
    """Pages that lie before the window hold poison."""
    torch.manual_seed(group)
    lengths = torch.randint(1, 64, (5,)).tolist()
    pool, tables, _ = filled(head_dim, dtype, lengths)
    for row, length in enumerate(lengths):
        for entry in range(max(0, length - window) // PAGE if window else 0):
            pool[tables[row, entry]] = NAN
    q = normal(5, group * HEADS * head_dim, dtype=dtype)
    ours, theirs = torch.full_like(q, NAN), torch.full_like(q, NAN)
    for kernels, out in ((core, ours), (reference, theirs)):
        kernels.attend(pool, 1, q, out, tables, torch.tensor(lengths), head_dim**-0.5, window)
    assert not ours.isnan().any(), "poison before the window or past the end got through"
    expect_close(ours, theirs, dtype, fp32=1e-5)


def test_rows_may_share_their_pages(core, dtype):
    pool, tables, _ = filled(8, dtype, [40])
    q, tables = normal(3, HEADS * 8, dtype=dtype), tables.repeat(3, 1)
    ours, theirs = torch.empty_like(q), torch.empty_like(q)
    for kernels, out in ((core, ours), (reference, theirs)):
        kernels.attend(pool, 1, q, out, tables, torch.tensor([40, 7, 40]), 0.3)
    expect_close(ours, theirs, dtype, fp32=1e-5)


@pytest.mark.parametrize("vocab", [16, 96, 1_000, 32_768])
def test_pick(core, dtype, vocab):
    dim = 24
    hidden, weight = normal(9, dim, dtype=dtype), normal(vocab, dim, dtype=dtype)
    logits = hidden @ weight.T
    results = []
    for kernels in (core, reference):
        tokens, logprobs = torch.full((9,), -1), torch.full((9,), NAN)
        kernels.pick(logits, hidden, weight, tokens, logprobs)
        results.append((tokens, logprobs))
    (ours, our_logprobs), (theirs, their_logprobs) = results
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(our_logprobs, their_logprobs, rtol=2e-4, atol=2e-4)  # a sum over the vocabulary


def test_near_ties_are_decided_by_the_exact_product(core):
    """Two tokens whose bf16 logits are equal, though one is likelier."""
    hidden = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    weight = torch.zeros(32, 2, dtype=torch.bfloat16)
    weight[5], weight[9] = torch.tensor([64.0, 0.125]), torch.tensor([64.0, 0.25])
    logits = hidden @ weight.T
    assert logits[0, 5] == logits[0, 9]
    for kernels in (core, reference):
        tokens, logprobs = torch.empty(1, dtype=torch.int64), torch.empty(1)
        kernels.pick(logits, hidden, weight, tokens, logprobs)
        assert tokens.tolist() == [9]
        assert logprobs[0] <= 0


@pytest.mark.parametrize("width", [4, 12, 128])
def test_lstm(core, width):
    lengths = torch.tensor([5, 0, 1, 17])
    offsets = torch.tensor([2, 7, 7, 8])
    steps = 30
    gates, weight = normal(steps, 4 * width), normal(width, 4 * width) / width**0.5
    h, c = normal(4, width), normal(4, width)
    results = []
    for kernels in (core, reference):
        state_h, state_c, out = h.clone(), c.clone(), torch.full((steps, width), 7.0)
        kernels.lstm(gates, weight, offsets, lengths, state_h, state_c, out)
        results.append((state_h, state_c, out))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(results[0][0][1], h[1]), "a row of no steps keeps its state bit for bit"
    assert torch.equal(results[0][1][1], c[1])
    assert (results[0][2][25:] == 7).all(), "steps of nobody are left alone"


def vad_weights() -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    channels = (129, 128, 64, 64, 128)
    convs = [normal(out, into, 3) / (3 * into) ** 0.5 for into, out in itertools.pairwise(channels)]
    return convs, [normal(out) for out in channels[1:]], normal(512, 128) / 128**0.5, normal(512)


def vad_args(pcm=None, context=None, counts=None, offsets=None, gates=None) -> tuple[Tensor, ...]:
    given = (pcm, context, counts, offsets, gates)
    usual = (normal(2, 3 * 512), normal(2, 64), ints(3, 1), ints(0, 3), torch.zeros(4, 512))
    return tuple(one if came is None else came for came, one in zip(given, usual, strict=True))


def test_voice_activity_encoder(core):
    """Windows of several rows share a block of the kernel, and there are more than a block of the reference; what lies
    past a row's own is never read."""
    counts, offsets = torch.tensor([150, 0, 1, 131]), torch.tensor([2, 152, 154, 155])
    assert counts.sum() > voice_activity_reference.BLOCK_WINDOWS
    pcm, context = normal(4, 150 * 512), normal(4, 64)
    for row, count in enumerate(counts.tolist()):
        pcm[row, count * 512 :] = NAN
    context[1] = NAN
    weights, results = vad_weights(), []
    for kernels in (core, reference):
        gates = torch.full((288, 512), 7.0)
        kernels.VoiceActivityEncoder(*weights).run(pcm, context, counts, offsets, gates)
        results.append(gates)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert (results[0][[0, 1, 152, 153, 286, 287]] == 7).all(), "steps of nobody are left alone"
    alone = torch.full((1, 512), 7.0)
    core.VoiceActivityEncoder(*weights).run(pcm[3:, 512:1024], pcm[3:, 448:512], ints(1), ints(0), alone)
    assert alone[0].equal(results[0][156]), "a window is the same to the bit wherever it stands in a block"


@pytest.mark.parametrize(
    "broken",
    [
        {"counts": torch.tensor([4, 1])},
        {"counts": torch.tensor([-1, 1])},
        {"offsets": torch.tensor([2, 0])},
        {"offsets": torch.tensor([-1, 0])},
        {"offsets": torch.tensor([0])},
        {"context": torch.zeros(2, 63)},
        {"gates": torch.zeros(4, 511)},
    ],
    ids=str,
)
def test_voice_activity_encoder_refuses_what_lies_outside(core, broken):
    with pytest.raises(ValueError):
        core.VoiceActivityEncoder(*vad_weights()).run(*vad_args(**broken))


def test_voice_activity_encoder_refuses_other_shapes(core):
    convs, biases, gates, gates_bias = vad_weights()
    for wrong in ((convs[:3], biases[:3]), (convs[::-1], biases), (convs, [*biases[1:], biases[0]])):
        with pytest.raises(ValueError):
            core.VoiceActivityEncoder(*wrong, gates, gates_bias)
    with pytest.raises(ValueError, match="512"):
        core.VoiceActivityEncoder(convs, biases, gates.T.contiguous(), gates_bias)


@pytest.mark.parametrize("items", [(1, 288), (37, 288), (1_000, 33)])
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_tanh_norm(core, dtype, items, offset):
    x = normal(*items) + offset
    ours_x, theirs_x = x.clone(), x.clone()
    ours, theirs = (torch.full(items, NAN, dtype=dtype) for _ in range(2))
    core.tanh_norm(ours_x, ours, 1e-5)
    reference.tanh_norm(theirs_x, theirs, 1e-5)
    tight = 2e-4 if offset else 2e-5  # squashed against 1, the spread is small and its digits few
    expect_close(ours, theirs, dtype, fp32=tight)
    plain = torch.tanh(x.double())
    plain = (plain - plain.mean()) / (plain.var(correction=0) + 1e-5).sqrt()
    expect_close(ours, plain, dtype, fp32=tight)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(core, threads):
    pool, tables, _ = filled(36, torch.float32, LENGTHS)
    q, results = normal(len(LENGTHS), HEADS * 36), []
    try:
        for count in (1, threads):
            core.set_threads(count)
            out = torch.empty_like(q)
            core.attend(pool, 0, q, out, tables, torch.tensor(LENGTHS), 0.2)
            results.append(out)
    finally:
        core.set_threads(torch.get_num_threads())
    assert torch.equal(*results)


# --- what must be refused -------------------------------------------------------------------------

I64, I32 = torch.int64, torch.int32
BIG = 2**63 - 1


def ints(*values: int, dtype: torch.dtype = I64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def pool_(**changes: object) -> Tensor:
    return torch.zeros(4, 2, 2, HEADS, 8 * PAGE, **changes)


Q = torch.zeros(1, HEADS * 8)
TABLE = torch.tensor([[1, 2]], dtype=I32)
COS = torch.zeros(5, 3)
LOGITS, HIDDEN, HEAD = torch.zeros(1, 8), torch.zeros(1, 4), torch.zeros(8, 4)
ROWS_2 = Q.repeat(2, 1)
QKV4, QKV3 = torch.zeros(1, 3, HEADS, 8), torch.zeros(1, 3, HEADS * 8)
KV = torch.zeros(17, 2, 2, HEADS * 8)
SCORES = torch.zeros(2, 1, 1, 4)
GATES, RECUR, STATE = torch.zeros(6, 16), torch.zeros(4, 16), torch.zeros(2, 4)


def lstm_args(gates=GATES, weight=RECUR, offsets=None, lengths=None, h=None, c=None, out=None) -> tuple:
    defaults = ints(0, 3), ints(3, 3), STATE.clone(), STATE.clone(), torch.zeros(6, 4)
    given = (offsets, lengths, h, c, out)
    return gates, weight, *(d if g is None else g for g, d in zip(given, defaults, strict=True))


WRONG = {
    "rope: three dimensions": ("rope", QKV3, ints(0), COS, COS),
    "rope: no dimension": ("rope", torch.tensor(1.0), ints(0), COS, COS),
    "rope: position past the angles": ("rope", QKV4, ints(5), COS, COS),
    "rope: negative position": ("rope", QKV4, ints(-1), COS, COS),
    "rope: int32 positions": ("rope", QKV4, ints(0, dtype=I32), COS, COS),
    "rope: two positions for one row": ("rope", QKV4, ints(0, 1), COS, COS),
    "rope: angles wider than a head": ("rope", QKV4, ints(0), torch.zeros(5, 5), torch.zeros(5, 5)),
    "rope: fewer sines": ("rope", QKV4, ints(4), COS, torch.zeros(2, 3)),
    "rope: float64": ("rope", QKV4.double(), ints(0), COS, COS),
    "rope: strided": ("rope", torch.zeros(1, 3, HEADS, 16)[..., ::2], ints(0), COS, COS),
    "rope: no tensor": ("rope", [1.0], ints(0), COS, COS),
    "softmax: length 0": ("softmax", SCORES, ints(0, 1), 1.0),
    "softmax: one length for two": ("softmax", SCORES, ints(1), 1.0),
    "softmax: two dimensions": ("softmax", SCORES[0, 0], ints(1), 1.0),
    "softmax: float16": ("softmax", SCORES.half(), ints(1, 1), 1.0),
    "store: page past the pool": ("store", pool_(), KV, ints(1, 4, dtype=I32)),
    "store: negative page": ("store", pool_(), KV, ints(1, -1, dtype=I32)),
    "store: short table": ("store", pool_(), KV, ints(1, dtype=I32)),
    "store: int64 table": ("store", pool_(), KV, ints(1, 2)),
    "store: other dtype": ("store", pool_(), KV.bfloat16(), ints(1, 2, dtype=I32)),
    "store: other layers": ("store", pool_(), KV[:, :1].contiguous(), ints(1, 2, dtype=I32)),
    "store: other width": ("store", pool_(), KV[..., :8].contiguous(), ints(1, 2, dtype=I32)),
    "append: layer past the end": ("append", pool_(), 2, QKV3, TABLE, ints(0)),
    "append: negative layer": ("append", pool_(), -1, QKV3, TABLE, ints(0)),
    "append: position past the table": ("append", pool_(), 0, QKV3, TABLE, ints(32)),
    "append: greatest position": ("append", pool_(), 0, QKV3, TABLE, ints(BIG)),
    "append: negative position": ("append", pool_(), 0, QKV3, TABLE, ints(-1)),
    "append: page past the pool": ("append", pool_(), 0, QKV3, TABLE + 3, ints(0)),
    "append: no dimension": ("append", pool_(), 0, torch.tensor(1.0), TABLE, ints(0)),
    "attend: length 0": ("attend", pool_(), 0, Q, Q.clone(), TABLE, ints(0), 1.0),
    "attend: length past the table": ("attend", pool_(), 0, Q, Q.clone(), TABLE, ints(33), 1.0),
    "attend: greatest length": ("attend", pool_(), 0, Q, Q.clone(), TABLE, ints(BIG), 1.0),
    "attend: page past the pool": ("attend", pool_(), 0, Q, Q.clone(), TABLE + 2, ints(17), 1.0),
    "attend: out of another dtype": ("attend", pool_(), 0, Q, Q.bfloat16(), TABLE, ints(1), 1.0),
    "attend: out of another shape": ("attend", pool_(), 0, Q, Q[:, :8].clone(), TABLE, ints(1), 1.0),
    "attend: two rows, one table": ("attend", pool_(), 0, ROWS_2, ROWS_2.clone(), TABLE, ints(1, 1), 1.0),
    "attend: pool of four dimensions": ("attend", pool_()[0], 0, Q, Q.clone(), TABLE, ints(1), 1.0),
    "attend: query without dimensions": (
        "attend", pool_(), 0, torch.tensor(1.0), Q.clone(), TABLE, ints(1), 1.0,
    ),
    "attend: query of no heads": ("attend", pool_(), 0, Q[:, :0], Q[:, :0].clone(), TABLE, ints(1), 1.0),
    "attend: query of one head and a half": (
        "attend", pool_(), 0, torch.cat([Q, Q[:, :8]], 1), torch.cat([Q, Q[:, :8]], 1), TABLE, ints(1), 1.0,
    ),
    "attend: negative window": ("attend", pool_(), 0, Q, Q.clone(), TABLE, ints(1), 1.0, -1),
    "attend: integer pool": ("attend", pool_(dtype=I32), 0, Q.int(), Q.int(), TABLE, ints(1), 1.0),
    "pick: mixed dtypes": ("pick", LOGITS, HIDDEN.bfloat16(), HEAD, ints(0), torch.zeros(1)),
    "pick: other vocabulary": ("pick", LOGITS, HIDDEN, torch.zeros(9, 4), ints(0), torch.zeros(1)),
    "pick: int32 tokens": ("pick", LOGITS, HIDDEN, HEAD, ints(0, dtype=I32), torch.zeros(1)),
    "pick: two tokens for one row": ("pick", LOGITS, HIDDEN, HEAD, ints(0, 0), torch.zeros(1)),
    "tanh_norm: out of another size": ("tanh_norm", torch.zeros(4), torch.zeros(5), 1e-5),
    "tanh_norm: out of another dtype": ("tanh_norm", torch.zeros(4), torch.zeros(4).double(), 1e-5),
    "tanh_norm: bf16": ("tanh_norm", torch.zeros(4).bfloat16(), torch.zeros(4).bfloat16(), 1e-5),
    "tanh_norm: nothing": ("tanh_norm", torch.zeros(0), torch.zeros(0), 1e-5),
    "lstm: past the steps": ("lstm", *lstm_args(lengths=ints(3, 4))),
    "lstm: overflow": ("lstm", *lstm_args(offsets=ints(0, BIG), lengths=ints(1, BIG))),
    "lstm: negative length": ("lstm", *lstm_args(lengths=ints(1, -1))),
    "lstm: negative offset": ("lstm", *lstm_args(offsets=ints(-1, 0))),
    "lstm: bf16": ("lstm", *lstm_args(gates=GATES.bfloat16())),
    "lstm: width of 3": ("lstm", *lstm_args(gates=torch.zeros(6, 12), weight=torch.zeros(3, 12),
                                            h=torch.zeros(2, 3), c=torch.zeros(2, 3), out=torch.zeros(6, 3))),
    "lstm: short out": ("lstm", *lstm_args(out=torch.zeros(5, 4))),
    "lstm: one row of c": ("lstm", *lstm_args(c=torch.zeros(1, 4))),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_invalid_shapes_are_refused_and_nothing_is_written(core, case):
    name, *arguments = WRONG[case]
    before = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    with pytest.raises((ValueError, TypeError)):
        getattr(core, name)(*arguments)
    for old, new in zip(before, arguments, strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new


def test_an_unknown_instruction_set_is_refused(core):
    with pytest.raises(ValueError, match="neon9"):
        core.choose_isa("neon9")


def test_pages_are_of_one_size_on_both_sides(core):
    assert core.PAGE == reference.PAGE == native.PAGE


def test_core_and_reference_have_the_same_kernels(core):
    for name in (
        "rope",
        "softmax",
        "store",
        "append",
        "store_int8",
        "attend_int8",
        "attend",
        "rms_norm",
        "rotate_append",
        "gate",
        "pick",
        "tanh_norm",
        "lstm",
    ):
        assert callable(getattr(core, name))
        assert callable(getattr(reference, name))


def test_without_the_core_the_reference_is_used(monkeypatch):
    monkeypatch.setenv("ASR_SERVE_NATIVE", "0")
    assert native.core() is None
    assert native.kernels() is reference


# --- 8-bit pages of cross-attention ---------------------------------------------------------------------


def int8_filled(head_dim: int, dtype: torch.dtype, kernels: ModuleType) -> tuple[Tensor, Tensor, list[Tensor]]:
    """As `filled`, by `kernels`, of 8 bits; one head is zero and one is small."""
    torch.manual_seed(3)
    pool, tables = poisoned_pool(head_dim, dtype), tables_of(LENGTHS)
    held = [normal(n, LAYERS, 2, HEADS * head_dim, dtype=dtype) for n in LENGTHS]
    held[4][0, 0, 0, :head_dim] = 0
    held[4][1] *= 1e-4
    for row, kv in enumerate(held):
        kernels.store_int8(pool, kv, tables[row])
    return pool, tables, held


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_8_bit_pages_are_those_of_the_reference(core, dtype, head_dim):
    ours, _, held = int8_filled(head_dim, dtype, core)
    theirs, tables, _ = int8_filled(head_dim, dtype, reference)
    for layer in range(LAYERS):
        for came, expected in zip(split_int8_pool(ours, layer), split_int8_pool(theirs, layer), strict=True):
            assert torch.equal(came.float().nan_to_num(7.0), expected.float().nan_to_num(7.0))
    audio = PagedKeyValues(theirs, tables, torch.tensor(LENGTHS), int8=True)
    exact = held[5][:, 1, 0].view(-1, HEADS, head_dim)[:, 1:].permute(1, 2, 0).float()
    step = exact.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((audio.keys(1, [1, 2], 5, LENGTHS[5]) - exact).abs() <= 0.501 * step).all())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_over_8_bit_pages(core, dtype, head_dim):
    """Equal to the reference, near that over pages of the dtype, and each row as if it were alone."""
    pool, tables, held = int8_filled(head_dim, dtype, core)
    lengths, scale = torch.tensor(LENGTHS), head_dim**-0.5
    q = normal(len(LENGTHS), HEADS * head_dim, dtype=dtype)
    whole = poisoned_pool(head_dim, torch.float32)
    for row, kv in enumerate(held):
        reference.store(whole, kv.float(), tables[row])
    ours, theirs, alone = (torch.full_like(q, NAN) for _ in range(3))
    exact = torch.full_like(q, NAN, dtype=torch.float32)
    core.attend_int8(pool, 1, q, ours, tables, lengths, scale)
    reference.attend_int8(pool, 1, q, theirs, tables, lengths, scale)
    reference.attend(whole, 1, q.float(), exact, tables, lengths, scale)
    for row in range(len(LENGTHS)):
        part = slice(row, row + 1)
        core.attend_int8(pool, 1, q[part], alone[part], tables[part], lengths[part], scale)
    expect_close(ours, theirs, dtype, fp32=1e-5)
    assert torch.equal(ours, alone)
    assert float((ours.float() - exact).norm() / exact.norm()) < 0.01


@pytest.mark.parametrize("int8", [False, True])
def test_a_copy_of_pages_holds_nothing_but_its_positions(core, dtype, int8):
    head_dim, positions = 36, 2 * PAGE + 5
    kv = normal(positions, LAYERS, 2, HEADS * head_dim, dtype=dtype)
    table = torch.tensor([4, 1, 6], dtype=torch.int32)
    store = core.store_int8 if int8 else core.store
    copies = []
    for left in (1.0, -2.0):
        pool = torch.full_like(poisoned_pool(head_dim, dtype), left)
        store(pool, kv, table)
        copies.append(pool[table.long()])
        zero_unused(copies[-1], positions, int8=int8)
    assert torch.equal(*(copy.view(torch.uint8) for copy in copies))
    again, first = torch.zeros_like(copies[0]), torch.arange(3, dtype=torch.int32)
    store(again, kv, first)
    assert torch.equal(again.view(torch.uint8), copies[0].view(torch.uint8))


def test_a_frame_that_is_no_number_stays_one(core, dtype):
    pool, table = poisoned_pool(8, dtype), torch.tensor([3], dtype=torch.int32)
    kv = torch.zeros(2, LAYERS, 2, HEADS * 8, dtype=dtype)
    kv[1, 0, 1, 5], kv[0, 1, 0, 9] = NAN, float("inf")
    for kernels in (core, reference):
        kernels.store_int8(pool, kv, table)
        assert split_int8_pool(pool, 0)[3][3, 0].isnan().tolist()[:2] == [False, True]
        assert split_int8_pool(pool, 1)[1][3, 1].isnan().tolist()[:2] == [True, False]


def test_what_does_not_fit_8_bit_pages_is_refused(core):
    pool, tables = torch.zeros(4, LAYERS, 2, HEADS, 2 * PAGE), torch.ones(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="4 numbers or more"):
        core.store_int8(pool, torch.zeros(3, LAYERS, 2, HEADS * 2), tables[0])
    q = torch.zeros(1, HEADS * 2)
    with pytest.raises(ValueError, match="4 numbers or more"):
        core.attend_int8(pool, 0, q, q.clone(), tables, torch.tensor([1]), 1.0)
    wide = torch.zeros(4, LAYERS, 2, HEADS, 8 * PAGE)
    q = torch.zeros(1, 2 * HEADS * 8)
    with pytest.raises(ValueError, match="q must be"):
        core.attend_int8(wide, 0, q, q.clone(), tables, torch.tensor([1]), 1.0)
