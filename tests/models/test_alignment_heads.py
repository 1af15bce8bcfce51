"""Where a decoder looks while it says an answer again is where it looked: Whisper's cross-attention is that of
transformers on random weights; which heads are looked at is known for every published size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_whisper import POISON, TOLERANCE, Reference, hear

from asr_serve.errors import WeightsCorrupt
from asr_serve.kernels import PAGE
from asr_serve.models.alignment_heads import AlignmentHeads, moonshine_alignment, whisper_alignment
from asr_serve.models.packing import PagedKeyValues, pack_clips

FIXTURE = Path(__file__).parent / "fixtures" / "whisper_attention.safetensors"
CLIPS = (0, 1)


@pytest.mark.parametrize("size", ["two languages", "third large"])
@torch.inference_mode()
def test_cross_attention_is_that_of_transformers(size: str) -> None:
    reference, wanted = Reference(size), load_file(FIXTURE)
    model = reference.model(1)
    model.alignment = AlignmentHeads({layer: tuple(range(model.heads)) for layer in range(model.layers)})
    hidden = hear(model, [reference.clips[clip] for clip in CLIPS])
    wide = -(-max(map(len, hidden)) // PAGE)
    pool = torch.full((1 + wide * len(CLIPS), model.layers, 2, model.heads, model.head_dim * PAGE), POISON)
    tables = 1 + torch.randperm(wide * len(CLIPS), generator=torch.Generator().manual_seed(1)).int().view(-1, wide)
    for table, mine in zip(tables, hidden, strict=True):
        model.kernels.store(pool, model.cross_keys_values(mine), table.contiguous())
    audio = PagedKeyValues(pool, tables, torch.tensor([len(mine) for mine in hidden]))
    given = [reference.said["given"][clip][: 9 - 2 * row] for row, clip in enumerate(CLIPS)]
    packing = pack_clips([len(tokens) for tokens in given], 8)
    tokens = torch.zeros(packing.total, dtype=torch.int64)
    tokens[: sum(map(len, given))] = torch.tensor([token for mine in given for token in mine])
    before = pool.clone()
    made = model.align(tokens, packing, audio, [len(mine) for mine in hidden])
    assert torch.equal(pool, before), "nothing is written"
    for row, (scores, clip) in enumerate(zip(made, CLIPS, strict=True)):
        theirs = wanted[f"{size}.{clip}"][:, :, : len(given[row])].flatten(0, 1)
        assert theirs.std() > 0.01
        torch.testing.assert_close(scores.softmax(dim=2), theirs, atol=TOLERANCE, rtol=0)


def test_fewer_frames_are_those_from_the_start() -> None:
    reference = Reference("two languages")
    model = reference.model(1)
    with torch.inference_mode():
        (hidden,) = hear(model, reference.clips[1:2])
        wide = -(-len(hidden) // PAGE)
        pool = torch.zeros(1 + wide, model.layers, 2, model.heads, model.head_dim * PAGE)
        table = torch.arange(1, 1 + wide, dtype=torch.int32)
        model.kernels.store(pool, model.cross_keys_values(hidden), table)
        audio = PagedKeyValues(pool, table[None], torch.tensor([len(hidden)]))
        tokens = torch.tensor(reference.said["given"][1][:8])
        (all_of_it,) = model.align(tokens, pack_clips([8], 8), audio, [len(hidden)])
        (some,) = model.align(tokens, pack_clips([8], 8), audio, [37])
    torch.testing.assert_close(some, all_of_it[:, :, :37])


@pytest.mark.parametrize(
    ("vocabulary", "layers", "heads", "width"),
    [
        (51_864, 4, 6, 384),
        (51_865, 4, 6, 384),
        (51_864, 6, 8, 512),
        (51_865, 6, 8, 512),
        (51_864, 12, 12, 768),
        (51_865, 12, 12, 768),
        (51_864, 24, 16, 1_024),
        (51_865, 24, 16, 1_024),
        (51_865, 32, 20, 1_280),
        (51_866, 32, 20, 1_280),
        (51_866, 4, 20, 1_280),
    ],
)
def test_every_published_whisper_has_its_heads(vocabulary: int, layers: int, heads: int, width: int) -> None:
    chosen = whisper_alignment(vocabulary, layers, heads, width).heads
    assert list(chosen) == sorted(chosen)
    assert chosen != whisper_alignment(vocabulary + 1_000, layers, heads, width).heads
    assert whisper_alignment(vocabulary, layers, heads, width, [(1, 2), (0, 1), (1, 0)]).heads == {0: (1,), 1: (2, 0)}


def test_of_another_size_the_later_half_looks() -> None:
    assert moonshine_alignment(5, 2, 64) == AlignmentHeads({2: (0, 1), 3: (0, 1), 4: (0, 1)})


@pytest.mark.parametrize("wrong", [(2, 0), (0, 4), (-1, 0)])
def test_heads_that_it_has_not(wrong: tuple[int, int]) -> None:
    with pytest.raises(WeightsCorrupt, match="2 layers of 4 heads"):
        whisper_alignment(100, 2, 4, 32, [wrong])
