"""Whisper's numbers are transformers' on random weights; silence that is heard as one position for several weighs
as much as it should, and no clip hears its neighbours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_configs
import torch
from safetensors import safe_open
from torch import Tensor

from asr_serve import devices
from asr_serve.errors import WeightsCorrupt
from asr_serve.kernels import PAGE
from asr_serve.models.asr.whisper import whisper
from asr_serve.models.asr.whisper.encoder_window import AFTER_POSITIONS, END_POSITIONS, SILENCE_STRIDE, WhisperWindow
from asr_serve.models.packing import PagedKeyValues
from asr_serve.models.registry import asr_cards

FIXTURE = Path(__file__).parent / "fixtures" / "whisper.safetensors"
TOLERANCE = 2e-4
"""To other software, on any CPU: matrix products of AVX-512, AMX and NEON add up in other orders."""
SAME = 2e-5
"""Between two ways to the same number: products of other shapes add up in another order."""
AFTER, END = 20, 8
"""Positions that are encoded one by one behind a clip, and before the window's end."""
POISON = 1e4
"""What pages hold before they are written: who reads too far gets a wrong answer."""


class Reference:
    """One checkpoint of transformers', what it heard and said, and our reading of it."""

    def __init__(self, size: str) -> None:
        with safe_open(FIXTURE, "pt") as file:
            self.said = json.loads(file.metadata()["said"])[size]
            names = list(file.keys())
            self.clips = [file.get_tensor(n).float() / 32_768 for n in names if n.startswith("clip.")]
            mine = {n.removeprefix(f"{size}."): file.get_tensor(n) for n in names if n.startswith(f"{size}.")}
        self.weights = {n.removeprefix("weights."): t for n, t in mine.items() if n.startswith("weights.")}
        self.hidden = [mine[f"hidden.{i}"] for i in range(len(self.clips))]
        self.logits = [mine[f"logits.{i}"] for i in range(len(self.clips))]
        self.config = whisper.Config.of(self.said["config"])

    def model(self, silence_stride: int, weights: dict[str, Tensor] | None = None) -> whisper.Model:
        """The window is 2 s: so much as in one of 30 s cannot be encoded around what is left out."""
        config = msgspec.structs.replace(self.config, silence_stride=silence_stride)
        made = whisper.Model(config, weights or self.weights, devices.make_device("cpu", "fp32"))
        made.encoder.window = WhisperWindow(config.max_source_positions, silence_stride, AFTER, END)
        return made


@pytest.fixture(scope="module", params=["two languages", "third large"])
def reference(request: pytest.FixtureRequest) -> Reference:
    return Reference(request.param)


@torch.inference_mode()
def hear(model: whisper.Model, clips: Sequence[Tensor], whole: Sequence[bool] = ()) -> list[Tensor]:
    """Hidden states of each clip, all in one batch, with the logarithms of how many positions each stands for."""
    hidden, packing = model.encode(clips, whole)
    wanted = whole or [False] * len(clips)
    assert packing.frames == [model.count_frames(len(clip), each) for clip, each in zip(clips, wanted, strict=True)]
    return [hidden[at : at + n] for at, n in zip(packing.offsets, packing.frames, strict=True)]


@torch.inference_mode()
def logits(model: whisper.Model, hidden: Sequence[Tensor], tokens: Sequence[Sequence[int]]) -> list[Tensor]:
    """Of each clip after each of its given tokens; rows stand at different places, and end at different ones."""
    rows, most = len(hidden), max(map(len, tokens))
    wide, deep = -(-most // PAGE), -(-max(map(len, hidden)) // PAGE)
    pool = torch.full((1 + rows * (wide + deep), model.layers, 2, model.heads, model.head_dim * PAGE), POISON)
    pages = 1 + torch.arange(rows * (wide + deep), dtype=torch.int32).view(rows, wide + deep)
    own, audio = pages[:, :wide].contiguous(), pages[:, wide:].contiguous()
    for table, mine in zip(audio, hidden, strict=True):
        model.kernels.store(pool, model.cross_keys_values(mine), table[: -(-len(mine) // PAGE)].contiguous())
    lengths = torch.tensor([len(mine) for mine in hidden])
    found: list[list[Tensor]] = [[] for _ in tokens]
    for step in range(most + rows):
        at = [min(max(step - row, 0), len(mine) - 1) for row, mine in enumerate(tokens)]
        given = torch.tensor([mine[place] for place, mine in zip(at, tokens, strict=True)])
        made, *_ = model.decode(
            given, PagedKeyValues(pool, own, torch.tensor(at) + 1), PagedKeyValues(pool, audio, lengths)
        )
        for row, place in enumerate(at):
            if len(found[row]) == place:
                found[row].append(made[row].clone())
    return [torch.stack(mine) for mine in found]


def test_config_reads_transformers_own(reference: Reference) -> None:
    for name in set(whisper.Config.__struct_fields__) - {"silence_stride", "alignment_heads"}:
        assert getattr(reference.config, name) == reference.said["config"][name], name


def test_the_encoder_hears_what_transformers_hears(reference: Reference) -> None:
    for mine, theirs in zip(hear(reference.model(1), reference.clips), reference.hidden, strict=True):
        assert theirs.std() > 0.5
        assert (mine[:, -1] == 0).all()
        torch.testing.assert_close(mine[:, :-1], theirs, atol=TOLERANCE, rtol=0)


def test_teacher_forced_logits(reference: Reference) -> None:
    model = reference.model(1)
    given = [mine[: 9 - 2 * row] for row, mine in enumerate(reference.said["given"])]
    made = logits(model, hear(model, reference.clips), given)
    for mine, theirs in zip(made, reference.logits, strict=True):
        assert theirs.std() > 0.1, "the weights say nothing: this would prove nothing"
        torch.testing.assert_close(mine, theirs[: len(mine)], atol=TOLERANCE, rtol=0)


def test_greedy_tokens(reference: Reference) -> None:
    model = reference.model(1)
    for clip, said in zip(reference.clips, reference.said["greedy"], strict=True):
        after = logits(model, hear(model, [clip]), [said[:-1]])[0]
        assert [model.bos, *after.argmax(-1).tolist()] == said


def test_a_clip_does_not_see_its_neighbours(reference: Reference) -> None:
    model = reference.model(SILENCE_STRIDE)
    together = hear(model, reference.clips)
    given = reference.said["given"]
    spoken = logits(model, together, given)
    for clip, mine, tokens, said in zip(reference.clips, together, given, spoken, strict=True):
        alone = hear(model, [clip])
        torch.testing.assert_close(mine, alone[0], atol=SAME, rtol=0)
        torch.testing.assert_close(said, logits(model, alone, [tokens])[0], atol=SAME, rtol=SAME)


@pytest.mark.parametrize("stride", [2, 4, 7, 1_000])
def test_one_position_weighs_as_much_as_those_it_stands_for(reference: Reference, stride: int) -> None:
    """Where silence is the same at every position, hearing it all and hearing one for many is the same; so it is
    of the window's last position, which hears zeros behind it."""
    still = dict(reference.weights)
    still["model.encoder.embed_positions.weight"] = torch.zeros(100, reference.config.d_model)
    few, all_of_it = reference.model(stride, still), reference.model(1, still)
    clips = [clip for clip in reference.clips if len(clip) < 16_000]
    assert clips
    heard, whole = hear(few, clips), hear(all_of_it, clips)
    for clip, mine, theirs in zip(clips, heard, whole, strict=True):
        real = -(-len(clip) // 320) + AFTER
        assert len(mine) == real + -(-(100 - END - real) // stride) + END < 100
        assert mine[:, -1].exp().sum() == pytest.approx(100, abs=1e-3)
        torch.testing.assert_close(mine[:real, :-1], theirs[:real, :-1], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(mine[-END:, :-1], theirs[-END:, :-1], atol=TOLERANCE, rtol=0)
    given = reference.said["given"][: len(clips)]
    for mine, theirs in zip(logits(few, heard, given), logits(all_of_it, whole, given), strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def test_whole_windows_lie_beside_others_in_one_batch(reference: Reference) -> None:
    packs, exact = reference.model(4), reference.model(1)
    clips = reference.clips
    wanted = [place % 2 == 0 for place in range(len(clips))]
    kinds = [exact if all_of_it else packs for all_of_it in wanted]
    for clip, mine, model in zip(clips, hear(packs, clips, wanted), kinds, strict=True):
        torch.testing.assert_close(mine, hear(model, [clip])[0], atol=SAME, rtol=0)


def test_frames_grow_with_the_clip_up_to_the_window(reference: Reference) -> None:
    model = reference.model(4)
    counts = [model.count_frames(samples) for samples in range(0, 40_000, 160)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (AFTER + -(-(100 - AFTER - END) // 4) + END, 100)
    assert {model.count_frames(samples, whole=True) for samples in range(0, 40_000, 160)} == {100}
    longer = torch.cat([reference.clips[-1], reference.clips[-1]])
    torch.testing.assert_close(hear(model, [longer]), hear(model, [reference.clips[-1]]))


@pytest.mark.parametrize("samples", range(0, 31 * 16_000, 7_919))
def test_all_positions_of_the_window_are_heard_once(samples: int) -> None:
    window = WhisperWindow(1_500, SILENCE_STRIDE)
    real = window.clip_positions(samples)
    if real == 1_500:
        assert samples > (1_500 - AFTER_POSITIONS - END_POSITIONS - 1) * 320
        return
    starts, sizes = window.silence_spans(real)
    assert real + len(starts) == window.count_frames(samples)
    assert starts.tolist() == [real, *(real + sizes.cumsum(0)).tolist()[:-1]]
    assert starts[-1] + sizes[-1] == 1_500
    assert sizes[-END_POSITIONS:].tolist() == [1] * END_POSITIONS


@pytest.mark.parametrize(
    "settings",
    [{"activation_function": "relu"}, {"scale_embedding": True}, {"vocab_size": 51_900}, {"vocab_size": 9_000}],
    ids=lambda settings: next(iter(settings)),
)
def test_config_refuses_what_we_do_not_compute(settings: dict[str, Any]) -> None:
    with pytest.raises(WeightsCorrupt, match=next(iter(settings))):
        whisper.Config.of(settings)


@pytest.mark.parametrize(
    "name",
    [
        "encoder.conv2.bias",
        "encoder.embed_positions.weight",
        "decoder.embed_tokens.weight",
        "decoder.layers.0.encoder_attn.k_proj.weight",
        "encoder.layers.0.fc1.bias",
        "encoder.layers.1.self_attn.v_proj.bias",
    ],
)
def test_a_missing_tensor_is_named(reference: Reference, name: str) -> None:
    held = dict(reference.weights)
    del held[f"model.{name}"]
    with pytest.raises(WeightsCorrupt, match=name.replace(".", r"\.")):
        reference.model(4, held)


def test_the_outer_name_may_be_left_out(reference: Reference) -> None:
    bare = {name.removeprefix("model."): value for name, value in reference.weights.items()}
    clip = reference.clips[0]
    assert torch.equal(hear(reference.model(4, bare), [clip])[0], hear(reference.model(4), [clip])[0])


def test_cards_name_every_published_size() -> None:
    mine = {card.name: card for card in asr_cards().values() if card.kind == "whisper"}
    assert len(mine) == len(whisper.CARDS) == 11
    assert mine["whisper-tiny-en"].languages == ("en",)
    assert len(mine["whisper-base"].languages) == 99
    assert mine["whisper-large-v3"].languages[-1] == "yue"
    assert mine["whisper-large-v3-turbo"].hub == "openai/whisper-large-v3-turbo"


def test_tiny_has_every_part() -> None:
    special = tiny_configs.whisper_config().special
    assert (special.eot, special.sot, special.languages) == (64, 65, {"en": 66, "zh": 67})
    assert special.timestamp_begin + 101 == tiny_configs.whisper_config().vocab_size
    assert special.multilingual
