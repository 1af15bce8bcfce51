"""Decoder layers as one native call: equal to the models' own layers, and a row is the same in any company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import tiny_configs
import tiny_moonshine
import tiny_whisper
import torch
from compiled_kernels import compiled
from torch import Tensor

from asr_serve import devices, kernels
from asr_serve.devices.decoder_layers import NativeDecoderLayers
from asr_serve.kernels import PAGE
from asr_serve.models.asr.moonshine import moonshine
from asr_serve.models.asr.whisper import whisper
from asr_serve.models.packing import PagedKeyValues

PAGES, SPARE_PAGE = 96, 95
POISON = float("nan")
FRAMES = [5, 16, 17, 70, 33, 1, 48, 90, 12, 64, 20, 31]
"""Frames of the rows' audio."""
LENGTHS = [1, 9, 16, 17, 18, 2, 7, 31, 12, 25, 3, 16]
"""Positions of the rows, the one that is decoded included."""


@pytest.fixture(params=["generic", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with compiled(request.param):
        yield request.param


@pytest.fixture(params=[("fp32", "int8"), ("bf16", "int8"), ("bf16", "dynamic"), ("bf16", "none")], ids="-".join)
def device(request: pytest.FixtureRequest, isa: str) -> Iterator[devices.cpu.CpuDevice]:
    dtype, quantize = request.param
    if quantize == "none" and not kernels.kernels().bf16_products():
        pytest.skip("this CPU, or what was compiled for it, has no products of bf16")
    made = devices.make_device("cpu", dtype, quantize)
    yield made
    made.set_threads(made.threads)


def build(kind: str, device: devices.cpu.CpuDevice) -> moonshine.Model | whisper.Model:
    if kind == "whisper":
        return whisper.Model(tiny_whisper.CONFIG, tiny_whisper.weights(tiny_whisper.CONFIG), device)
    config = tiny_configs.moonshine_config()
    return moonshine.Model(config, tiny_moonshine.weights(config), device)


class Pass(NamedTuple):
    """Tokens of a pass, one a row, and where the rows' keys and values lie."""

    tokens: Tensor
    own: PagedKeyValues
    audio: PagedKeyValues

    def part(self, rows: slice, pool: Tensor) -> Pass:
        tables = (self.own.block_tables[rows].contiguous(), self.audio.block_tables[rows].contiguous())
        own = PagedKeyValues(pool, tables[0], self.own.lengths[rows])
        return Pass(self.tokens[rows], own, PagedKeyValues(pool, tables[1], self.audio.lengths[rows]))


def rows_of(model: moonshine.Model | whisper.Model, device: devices.cpu.CpuDevice) -> Pass:
    """Rows whose earlier positions hold numbers, and all else poison."""
    chance = torch.Generator().manual_seed(7)
    pool = torch.full((PAGES, model.layers, 2, model.heads, model.head_dim * PAGE), POISON, dtype=device.dtype)
    pages = (1 + torch.randperm(SPARE_PAGE - 1, generator=chance)).tolist()
    width = model.heads * model.head_dim

    def fill(counts: list[int], positions: int) -> Tensor:
        tables = torch.zeros(len(counts), positions // PAGE + 1, dtype=torch.int32)
        for row, count in enumerate(counts):
            for entry in range(-(-max(count, 1) // PAGE)):
                tables[row, entry] = pages.pop()
            held = torch.randn(count, model.layers, 2, width, generator=chance).to(device.dtype)
            kernels.reference.store(pool, held, tables[row])
        return tables

    audio = PagedKeyValues(pool, fill(FRAMES, 96), torch.tensor(FRAMES))
    tables = fill([length - 1 for length in LENGTHS], 32)
    for row, length in enumerate(LENGTHS):
        if length % PAGE == 1 and length > 1:
            tables[row, length // PAGE] = pages.pop()
    tokens = torch.randint(0, model.vocab_size, (len(LENGTHS),), generator=chance)
    return Pass(tokens, PagedKeyValues(pool, tables, torch.tensor(LENGTHS)), audio)


@torch.inference_mode()
def run(model: moonshine.Model | whisper.Model, given: Pass) -> tuple[list[Tensor], Tensor]:
    """What the decoder returns, and the pool after it."""
    pool = given.own.pool.clone()
    own, audio = given.own._replace(pool=pool), given.audio._replace(pool=pool)
    return [each.float() for each in model.decode(given.tokens, own, audio)[1:]], pool


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["moonshine", "whisper"])
def test_one_call_equals_the_models_own_layers(kind: str, threads: int, device: devices.cpu.CpuDevice) -> None:
    model = build(kind, device)
    assert model.decoder_stack.native is not None
    device.set_threads(threads)
    given = rows_of(model, device)
    ours, our_pool = run(model, given)
    model.decoder_stack.native = None
    theirs, their_pool = run(model, given)
    assert torch.equal(our_pool.isnan(), their_pool.isnan()), "keys and values of other positions than the rows' own"
    bound = 2e-4 if device.dtype == torch.float32 else 0.06
    assert len(ours) == 1 + len(model.alignment.heads)
    for came, expected in [*zip(ours, theirs, strict=True), (our_pool, their_pool)]:
        difference = (came.nan_to_num() - expected.nan_to_num()).float()
        assert float(difference.norm()) < bound * float(expected.nan_to_num().float().norm())


@pytest.mark.parametrize("kind", ["moonshine", "whisper"])
def test_a_row_is_the_same_in_any_company(kind: str, device: devices.cpu.CpuDevice) -> None:
    """On threads that share the rows out, on one, and alone; beside rows that fill the batch."""
    model = build(kind, device)
    given = rows_of(model, device)
    device.set_threads(2)
    padded = Pass(
        torch.cat([given.tokens, torch.zeros(4, dtype=torch.int64)]),
        *(
            PagedKeyValues(
                pages.pool,
                torch.cat([pages.block_tables, torch.zeros(4, pages.block_tables.shape[1], dtype=torch.int32)]),
                torch.cat([pages.lengths, torch.ones(4, dtype=torch.int64)]),
            )
            for pages in (given.own, given.audio)
        ),
    )
    together, pool = run(model, padded)
    device.set_threads(1)
    single, single_pool = run(model, given)
    assert torch.equal(pool.nan_to_num(), single_pool.nan_to_num())
    for row in range(len(LENGTHS)):
        alone, _ = run(model, given.part(slice(row, row + 1), given.own.pool))
        for of_all, of_one, of_row in zip(together, single, alone, strict=True):
            assert torch.equal(of_all[row], of_one[row])
            assert torch.equal(of_one[row], of_row[0])


@pytest.mark.parametrize("kind", ["moonshine", "whisper"])
@pytest.mark.parametrize("beside", [2, len(LENGTHS) - 1])
def test_positions_of_one_sequence_in_a_pass_see_each_other(
    kind: str, beside: int, device: devices.cpu.CpuDevice
) -> None:
    """A draft over two pages, beside other rows, is what decoding its tokens one by one is; and so are those rows.
    Beside many, threads share the rows out, and the draft's go to one of them; beside few, all compute each layer."""
    model = build(kind, device)
    device.set_threads(2)
    given = rows_of(model, device)
    row, drafted = 7, 8  # from position 30 over the border of a page
    tables = given.own.block_tables.clone()
    tables[row, 2] = SPARE_PAGE
    tokens = torch.arange(drafted) % model.vocab_size
    pool = given.own.pool.clone()
    expected = []
    for step in range(drafted):
        index = slice(row, row + 1)
        one = Pass(
            tokens[step : step + 1],
            PagedKeyValues(pool, tables[index], torch.tensor([LENGTHS[row] + step])),
            PagedKeyValues(pool, given.audio.block_tables[index], given.audio.lengths[index]),
        )
        outputs, pool = run(model, one)
        expected.append(outputs)
    others = [other for other in range(len(LENGTHS)) if other != row][:beside]
    first = sum(other < row for other in others)
    index = torch.tensor([*others[:first], *[row] * drafted, *others[first:]])
    lengths = torch.tensor(LENGTHS)[index]
    lengths[first : first + drafted] += torch.arange(drafted)
    many = given.tokens[index]
    many[first : first + drafted] = tokens
    whole = Pass(
        many,
        PagedKeyValues(given.own.pool, tables[index], lengths),
        PagedKeyValues(given.own.pool, given.audio.block_tables[index], given.audio.lengths[index]),
    )
    together, _ = run(model, whole)
    for step, outputs in enumerate(expected):
        for of_all, of_one in zip(together, outputs, strict=True):
            assert torch.equal(of_all[first + step], of_one[0])
    for at, other in enumerate(index.tolist()):
        if other != row:
            alone, _ = run(model, given.part(slice(other, other + 1), given.own.pool))
            for of_all, of_row in zip(together, alone, strict=True):
                assert torch.equal(of_all[at], of_row[0])


def test_what_does_not_fit_is_refused() -> None:
    core = kernels.core()
    if core is None:
        pytest.skip("the native core is not built or not wanted: pip install -e . builds it")
    device = devices.make_device("cpu", "fp32", "int8")
    model = build("moonshine", device)
    given = rows_of(model, device)
    assert model.decoder_stack.native is not None
    x = torch.zeros(len(LENGTHS), 8)
    with pytest.raises(ValueError, match="x must be"):
        model.decoder_stack.native(x, given.own, given.audio, [])
    x = model.embedding.embed(given.tokens)
    with pytest.raises(ValueError, match="page out of range"):
        model.decoder_stack.native(x, given.own._replace(block_tables=given.own.block_tables + PAGES), given.audio, [])
    with pytest.raises(ValueError, match="length outside the table"):
        model.decoder_stack.native(x, given.own, given.audio._replace(lengths=given.audio.lengths * 100), [])
    with pytest.raises(ValueError, match="layer out of range"):
        model.decoder_stack.native(x, given.own, given.audio, [model.layers])
    with pytest.raises(ValueError, match="one dtype"):
        model.decoder_stack.native(x, given.own._replace(pool=given.own.pool.bfloat16()), given.audio, [])


def test_a_product_with_a_norm_of_its_own_is_refused() -> None:
    """The layer's norm precedes it: its input would be normalized twice."""
    if kernels.core() is None:
        pytest.skip("the native core is not built or not wanted: pip install -e . builds it")
    device = devices.make_device("cpu", "fp32", "int8")
    model = build("moonshine", device)
    parts = model.decoder[0].parts
    up = device.linear(torch.ones(parts.up.outputs, parts.up.inputs), norm=parts.feed_norm)
    sizes = {"heads": model.heads, "head_dim": model.head_dim, "scale": model.attention_scale, "gated": True}
    with pytest.raises(ValueError, match="no norm of its own"):
        NativeDecoderLayers.build(device, [parts._replace(up=up)], **sizes)
    assert NativeDecoderLayers.build(device, [parts], **sizes) is not None
