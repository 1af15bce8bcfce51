"""Moonshine Streaming's numbers are transformers' on random weights; chunk by chunk they are those of the whole
utterance, whoever else is in the batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tiny_configs
import torch
from safetensors import safe_open
from torch import Tensor

from asr_serve import devices
from asr_serve.decoding.hypothesis import Hypothesis
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.seq2seq.decoder import DecodeRunner
from asr_serve.engine.seq2seq.encoder import EncoderResult, EncodeRunner
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.moonshine import moonshine_streaming
from asr_serve.models.interfaces import UNBOUNDED_SAMPLES, StreamingChunk
from asr_serve.models.packing import PagedKeyValues
from asr_serve.models.registry import asr_cards

FIXTURE = Path(__file__).parent / "fixtures" / "moonshine_streaming.safetensors"
TOLERANCE = 1e-4
SAME = 1e-5
"""Between two ways to the same number: products of other shapes add up in another order."""


class Reference:
    """One checkpoint of transformers', what it heard and said, and our reading of it."""

    def __init__(self, size: str, dtype: str = "fp32") -> None:
        self.size = size
        with safe_open(FIXTURE, "pt") as file:
            self.said = json.loads(file.metadata()["said"])[size]
            names = list(file.keys())
            self.clips = [file.get_tensor(n).float() / 32_768 for n in names if n.startswith("clip.")]
            mine = {n.removeprefix(f"{size}."): file.get_tensor(n) for n in names if n.startswith(f"{size}.")}
        self.weights = {n.removeprefix("weights."): t for n, t in mine.items() if n.startswith("weights.")}
        self.hidden = [mine[f"hidden.{i}"] for i in range(len(self.clips))]
        self.logits = [mine[f"logits.{i}"] for i in range(len(self.clips))]
        self.config = moonshine_streaming.Config.of(self.said["config"])
        self.device = devices.make_device("cpu", dtype)
        self.model = moonshine_streaming.Model(self.config, self.weights, self.device)

    @torch.inference_mode()
    def whole(self, clips: Sequence[Tensor]) -> list[Tensor]:
        """Encoder output of each clip, all in one batch."""
        hidden, packing = self.model.encoder.encode_clips(clips)
        return [hidden[at : at + n] for at, n in zip(packing.offsets, packing.frames, strict=True)]


@pytest.fixture(scope="module", params=["wide", "tiny's"])
def reference(request: pytest.FixtureRequest) -> Reference:
    return Reference(request.param)


# --- transformers -----------------------------------------------------------------------------------------


def test_the_encoder_hears_what_transformers_hears(reference: Reference) -> None:
    for mine, theirs, clip in zip(reference.whole(reference.clips), reference.hidden, reference.clips, strict=True):
        assert len(theirs) == reference.model.count_frames(len(clip))
        assert theirs.std() > 0.5
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)


def test_a_clip_does_not_see_its_neighbours(reference: Reference) -> None:
    for clip, mine in zip(reference.clips, reference.whole(reference.clips), strict=True):
        torch.testing.assert_close(mine, reference.whole([clip])[0], atol=SAME, rtol=0)


def results(reference: Reference) -> list[EncoderResult]:
    runner = EncodeRunner(reference.model, reference.device)
    return runner.encode([clip.numpy() for clip in reference.clips])


def decoder(reference: Reference) -> DecodeRunner:
    return DecodeRunner(reference.model, reference.device, len(reference.clips), 1 << 20, 128)


def hypothesis(reference: Reference, most: int) -> Hypothesis:
    return Hypothesis(SearchOptions(), reference.model.eos, most, lambda tokens: " ".join(map(str, tokens)))


def test_teacher_forced_logits(reference: Reference) -> None:
    for result, given, theirs in zip(results(reference), reference.said["given"], reference.logits, strict=True):
        runner = decoder(reference)
        runner.add_row(0, result, hypothesis(reference, len(given) + 1))
        assert result.frames <= 128
        for at, token in enumerate(given):
            tokens, lengths = torch.tensor([token]), torch.tensor([at + 1])
            seats = runner.batch
            own = PagedKeyValues(runner.kv_cache, seats.token_tables[:1], lengths)
            audio = PagedKeyValues(runner.kv_cache, seats.audio_tables[:1], seats.audio_lengths[:1])
            with torch.inference_mode():
                logits, *_ = reference.model.decode(tokens, own, audio)
            torch.testing.assert_close(logits[0], theirs[at], atol=TOLERANCE, rtol=0)


def test_the_engine_says_what_transformers_says(reference: Reference) -> None:
    """All clips as rows of one decoder, which knows of no other Moonshine than the offline one."""
    runner, found = decoder(reference), {}
    for i, result in enumerate(results(reference)):
        runner.add_row(i, result, hypothesis(reference, len(reference.said["greedy"][i]) - 1))
    while runner.rows:
        for row in runner.step():
            found[row.request_id] = [reference.model.bos, *row.hypothesis.tokens]
            runner.remove_row(row)
    assert [found[i] for i in range(len(found))] == reference.said["greedy"]


# --- sessions ---------------------------------------------------------------------------------------------


class Sessions:
    """What an engine does: rows of state, windows of samples, chunks. Nobody's memory is poison."""

    def __init__(self, reference: Reference, clips: Sequence[Tensor], longest: int) -> None:
        self.encoder, self.clips, self.longest = reference.model.encoder, clips, longest
        self.seen = [0] * len(clips)
        self.total = [self.encoder.count_frames(len(clip)) for clip in clips]
        self.heard: list[list[Tensor]] = [[] for _ in clips]
        self.state = {}
        for name, spec in self.encoder.state_specs(longest).items():
            self.state[name] = torch.full((len(clips) + 1, *spec.shape), torch.nan, dtype=spec.dtype)
            if spec.initial_value is not None:
                self.state[name][: len(clips)] = spec.initial_value

    def step(self, who: Sequence[int], frames: int, fill: int = 0, live: bool = False) -> None:
        """`live`: no session knows where it ends before it must."""
        window = self.encoder.audio_window(frames)
        pcm = torch.zeros(len(who) + fill, window.samples)
        seen, has, ends = (torch.zeros(len(who) + fill, dtype=torch.int64) for _ in range(3))
        for at, i in enumerate(who):
            clip, begin = self.clips[i], self.seen[i] * self.encoder.frame_samples - window.left_samples
            part = clip[max(begin, 0) : max(begin + window.samples, 0)]
            pcm[at, max(-begin, 0) : max(-begin, 0) + len(part)] = part
            open_ended = live and begin + window.samples <= len(clip)
            seen[at], ends[at] = self.seen[i], UNBOUNDED_SAMPLES if open_ended else len(clip)
            has[at] = min(frames, self.total[i] - self.seen[i])
        rows = torch.tensor([*who, *[len(self.clips)] * fill])
        with torch.inference_mode():
            out = self.encoder.step(StreamingChunk(pcm, rows, seen, has, ends), self.state)
        assert out.shape[:2] == (len(rows), frames)
        for at, i in enumerate(who):
            self.heard[i].append(out[at, : has[at]].clone())
            self.seen[i] += int(has[at])

    def open(self) -> list[int]:
        return [i for i, total in enumerate(self.total) if self.seen[i] < total]

    def output(self) -> list[Tensor]:
        return [torch.cat(parts) for parts in self.heard]


@pytest.mark.parametrize("frames", [1, 3, 8, 70])
@pytest.mark.parametrize("live", [False, True], ids=["the end is known", "the end comes"])
def test_chunks_make_no_difference(reference: Reference, frames: int, live: bool) -> None:
    sessions = Sessions(reference, reference.clips, frames)
    while who := sessions.open():
        sessions.step(who, frames, live=live)
    for mine, whole in zip(sessions.output(), reference.whole(reference.clips), strict=True):
        torch.testing.assert_close(mine, whole, atol=SAME, rtol=0)


def test_neighbours_make_no_difference(reference: Reference, rng: np.random.Generator) -> None:
    """Sessions step when they like, some of them with rows that only fill the batch, by chunks of any length."""
    clips = [reference.clips[i] for i in (2, 0, 1, 2, 3)]
    sessions = Sessions(reference, clips, 9)
    while left := sessions.open():
        who = [i for i in left if rng.random() < 0.6]
        if who:
            rng.shuffle(who)
            sessions.step(who, int(rng.integers(1, 10)), fill=int(rng.integers(0, 3)), live=bool(rng.integers(2)))
    for mine, whole in zip(sessions.output(), reference.whole(clips), strict=True):
        torch.testing.assert_close(mine, whole, atol=SAME, rtol=0)


def test_every_length_ends_as_it_should(reference: Reference) -> None:
    """A last chunk of every size, the end at every place of it."""
    fs = reference.model.encoder.frame_samples
    clips = [reference.clips[2][:n] for n in (1, fs - 1, fs, 4 * fs + 80, 12 * fs + 79, 13 * fs, 17 * fs + 240)]
    sessions = Sessions(reference, clips, 5)
    while who := sessions.open():
        sessions.step(who, 5, live=True)
    for mine, whole in zip(sessions.output(), reference.whole(clips), strict=True):
        torch.testing.assert_close(mine, whole, atol=SAME, rtol=0)


def test_a_frame_waits_for_no_more_than_its_window(reference: Reference) -> None:
    """What lies past the window of the first chunk changes nothing in it. Published sizes wait for 12 frames."""
    encoder, clip = reference.model.encoder, reference.clips[2]
    assert encoder.ahead == {"wide": 6, "tiny's": 12}[reference.size]
    window = encoder.audio_window(4)
    assert window.samples == (4 + encoder.ahead) * encoder.frame_samples
    reach = window.samples - window.left_samples
    first = reference.whole([clip])[0][:4]
    after = clip.clone()
    after[reach:] += 0.1 * torch.randn(len(clip) - reach)
    torch.testing.assert_close(reference.whole([after])[0][:4], first, atol=SAME, rtol=0)


def test_what_is_collected_frame_by_frame_is_what_the_decoder_hears(reference: Reference) -> None:
    """`cross` of adapted frames, in two parts, is what encoding the clip at once gives."""
    model, clip = reference.model, reference.clips[1]
    sessions = Sessions(reference, [clip], 8)
    while sessions.open():
        sessions.step([0], 8)
    hidden = sessions.output()[0]
    with torch.inference_mode():
        parts = [
            model.cross_keys_values(model.add_positions(hidden[at:to], torch.arange(at, to)))
            for at, to in ((0, 20), (20, len(hidden)))
        ]
    result = EncodeRunner(model, reference.device).encode([clip.numpy()])[0]
    torch.testing.assert_close(torch.cat(parts), result.decoder_input, atol=SAME, rtol=0)


def test_bf16_is_near() -> None:
    exact, coarse = Reference("wide"), Reference("wide", "bf16")
    sessions = Sessions(coarse, coarse.clips, 8)
    while who := sessions.open():
        sessions.step(who, 8)
    for mine, whole in zip(sessions.output(), exact.whole(exact.clips), strict=True):
        assert mine.dtype == torch.bfloat16
        assert torch.nn.functional.cosine_similarity(mine.float(), whole, dim=-1).mean() > 0.995


def test_nothing_a_session_remembers_grows(reference: Reference) -> None:
    encoder = reference.model.encoder
    assert encoder.heads == ()
    specs = encoder.state_specs(8)
    row_bytes = sum(torch.zeros(spec.shape, dtype=spec.dtype).nbytes for spec in specs.values())
    assert row_bytes < 200_000
    assert {name for name, spec in specs.items() if spec.initial_value is None} == {
        f"{kind}.{i}" for kind in ("keys", "values") for i in range(len(encoder.layers))
    }


# --- checkpoints ------------------------------------------------------------------------------------------


def test_cards_name_what_is_published() -> None:
    mine = {name: card for name, card in asr_cards().items() if card.kind == "moonshine_streaming"}
    assert {card.hub for card in mine.values()} == {
        f"UsefulSensors/moonshine-streaming-{size}" for size in ("tiny", "small", "medium")
    }
    assert not any(card.streaming for card in mine.values())


def test_config_reads_transformers_own() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="the oracle: a dev dependency")
    theirs = transformers.MoonshineStreamingConfig()
    assert moonshine_streaming.Config.of(theirs.to_dict()) == moonshine_streaming.Config()
    small = transformers.MoonshineStreamingConfig(
        hidden_size=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        encoder_config={"hidden_size": 620, "head_dim": 64, "sliding_windows": [[16, 4]] * 6},
    )
    ours = moonshine_streaming.Config.of(small.to_dict())
    assert (ours.head_dim, ours.rotary, ours.turns, ours.decoder.rotary_half(8)) == (64, 32, 16, 16)
    assert (ours.encoder_config.hidden_size, ours.encoder_config.head_dim) == (620, 64)
    assert ours.encoder_config.reach == [(15, 3)] * 6


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"encoder_config": {"num_key_value_heads": 2}}, "encoder_config.num_key_value_heads=2"),
        ({"attention_bias": True}, "attention_bias"),
        ({"encoder_config": {"hidden_act": "relu"}}, "encoder_config.hidden_act=relu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type=yarn"),
        ({"head_dim": 64}, "head_dim=64"),
        ({"partial_rotary_factor": 0.02}, "partial_rotary_factor"),
        ({"encoder_config": {"sliding_windows": [[16, 4]]}}, "sliding_windows"),
        ({"encoder_config": {"num_hidden_layers": 1, "sliding_windows": [[0, 4]]}}, "sliding_windows"),
    ],
)
def test_config_refuses_what_we_do_not_compute(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(WeightsCorrupt, match=named):
        moonshine_streaming.Config.of(settings)


@pytest.fixture
def tensors(reference: Reference) -> dict[str, Tensor]:
    return dict(reference.weights)


@pytest.mark.parametrize(
    "name",
    [
        "model.encoder.embedder.comp.log_k",
        "model.encoder.embedder.conv2.bias",
        "model.encoder.layers.1.self_attn.k_proj.weight",
        "model.encoder.final_norm.gamma",
        "model.decoder.pos_emb.weight",
        "model.decoder.layers.0.encoder_attn.v_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(reference: Reference, tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]
    with pytest.raises(WeightsCorrupt, match=name.replace(".", r"\.")):
        moonshine_streaming.Model(reference.config, tensors, reference.device)


def test_every_tensor_of_a_checkpoint_is_one_of_ours(reference: Reference) -> None:
    assert all(moonshine_streaming.rename(name) == name for name in reference.weights)
    assert moonshine_streaming.rename("optimizer.step") is None


def test_the_output_projection_is_the_embedding_where_there_is_none(reference: Reference) -> None:
    tensors = {name: tensor for name, tensor in reference.weights.items() if name != "proj_out.weight"}
    tied = moonshine_streaming.Model(reference.config, tensors, reference.device)
    torch.testing.assert_close(tied.head_weight, tied.embedding.weight)


def test_tiny_has_every_part() -> None:
    config = tiny_configs.moonshine_streaming_config()
    again = moonshine_streaming.Config.of(msgspec.to_builtins(config))
    assert again == config
    assert config == Reference("wide").config
    assert {ahead > 0 for _, ahead in config.encoder_config.reach} == {True, False}
