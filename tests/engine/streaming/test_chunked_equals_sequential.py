"""Chunked execution equals the sequential path and the whole utterance: numbers to 1e-4, tokens exactly.

Over models, searches, chunk sizes, left contexts, and whatever company sessions keep: they join and leave at any
moment, bring their audio in any pieces, wait or hurry. What nobody may read is poison throughout.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from case_tiers import exhaustive_after
from tiny_streaming import Company, Said, clips, model

from asr_serve.engine.streaming.model_runner import ChunkedModelRunner
from asr_serve.models.interfaces import AudioWindow, State, StateSpec, StreamingChunk, StreamingEncoder

MODELS = {
    "fastconformer 8,1": ("ctc", "ctc beam", "ctc batched", "rnnt", "rnnt beam"),
    "fastconformer 8,3": ("ctc", "rnnt"),
    "fastconformer 2,0": ("rnnt",),
    "tdt 8,1": ("rnnt", "rnnt beam"),
    "u2pp 2": ("ctc", "ctc beam", "ctc batched"),
    "u2pp 1": ("ctc",),
    "deepspeech": ("ctc", "ctc beam"),
    "kaldi_chain": ("none",),
    "moonshine": ("none",),
}
CASES = [(name, search) for name, searches in MODELS.items() for search in searches]
BLOCK_CASES = [(name, search, 5) for name, search in CASES] + [
    pytest.param(name, search, blocks, marks=marks if search == MODELS[name][0] else pytest.mark.exhaustive)
    for name, search in CASES
    for blocks, marks in ((1, ()), (2, pytest.mark.slow))
]
"""Chunks of several blocks with every search; of one and of two with one search of each model."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alone(name: str, search: str, seed: int, chunk: int) -> dict[int, Said]:
    """The sequential path: each session by itself."""
    return Company(model(name), search, chunk, chunked=False).hear(clips(seed), random.Random(seed))


@pytest.mark.parametrize(("name", "search", "blocks"), BLOCK_CASES)
@pytest.mark.repeats(blocks=2, name={"fastconformer 8,3", "fastconformer 2,0", "u2pp 1", "kaldi_chain"})
def test_chunked_equals_sequential_and_the_whole_utterance(name: str, search: str, blocks: int):
    network = model(name)
    chunk, seed = blocks * network.frame_block, 10 * blocks + len(name)
    want = alone(name, search, seed, network.frame_block)
    company = Company(network, search, chunk, chunked=True, wait_ms=60.0, live=0.0 if blocks == 2 else 0.7)
    got = company.hear(clips(seed), random.Random(seed + 1))
    assert max(company.search.batches) > 1, "nobody shared a step"
    said = 0
    for number, clip in enumerate(clips(seed)):
        with torch.inference_mode():
            whole = network.encode_utterance(torch.from_numpy(clip))[0]
        ours, theirs = got[number], want[number]
        assert [(t.id, t.frame) for t in ours.tokens] == [(t.id, t.frame) for t in theirs.tokens]
        torch.testing.assert_close(
            torch.tensor([t.logprob for t in ours.tokens]),
            torch.tensor([t.logprob for t in theirs.tokens]),
            atol=1e-4,
            rtol=0,
        )
        said += len(ours.tokens)
        assert len(whole) == network.count_frames(len(clip))
        if len(whole):
            torch.testing.assert_close(ours.hidden, whole, atol=1e-4, rtol=0)
            torch.testing.assert_close(theirs.hidden, whole, atol=1e-4, rtol=0)
    assert said > 3 or search == "none", "the model is silent"


@pytest.mark.slow
@pytest.mark.parametrize("seed", exhaustive_after(1, range(6)))
def test_batching_changes_nothing(seed: int):
    """More companies, of one model."""
    want = alone("fastconformer 8,1", "rnnt", seed, 2)
    for again in range(2):
        company = Company(model("fastconformer 8,1"), "rnnt", 2, chunked=True, slots=2 + seed, max_rows=3)
        got = company.hear(clips(seed), random.Random(100 * seed + again))
        assert {n: each.tokens and [t[:2] for t in each.tokens] for n, each in got.items()} == {
            n: each.tokens and [t[:2] for t in each.tokens] for n, each in want.items()
        }


@pytest.mark.parametrize("name", ["fastconformer 8,1", "u2pp 2", "deepspeech"])
def test_bf16_is_near_and_equal_to_itself(name: str):
    """In bf16 the sums of a batch may come out in another order than those of one session: 3 % of the spread."""
    network, exact = model(name, torch.bfloat16), model(name)
    got = Company(network, "ctc", 2 * network.frame_block, chunked=True).hear(clips(3), random.Random(1))
    want = Company(network, "ctc", network.frame_block, chunked=False).hear(clips(3), random.Random(2))
    for number, clip in enumerate(clips(3)):
        if not len(clip):
            continue
        with torch.inference_mode():
            whole = exact.encode_utterance(torch.from_numpy(clip))[0]
        spread = float(whole.std())
        difference = (got[number].hidden.float() - want[number].hidden.float()).abs()
        assert float(difference.mean()) < 0.03 * spread
        assert float((got[number].hidden.float() - whole).abs().mean()) < 0.1 * spread


def company(**options) -> Company:
    return Company(model("deepspeech"), "ctc", 4, **({"chunked": True, "slots": 4} | options))


def noise(frames: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(320 * frames).astype(np.float32)


def test_ready_streams_wait_a_bounded_time_for_a_batch():
    wrapper = company(wait_ms=10.0).wrapper
    first, second, silent = (wrapper.open_session() for _ in range(3))
    assert (wrapper.due_ms, wrapper.schedule(0.0)) == (None, [])
    wrapper.append_audio(first, noise(30), 100.0)
    assert (wrapper.due_ms, wrapper.schedule(109.9)) == (110.0, [])
    assert wrapper.schedule(110.0) == [first]
    wrapper.append_audio(second, noise(30), 105.0)
    assert wrapper.due_ms == 110.0, "whoever comes later puts nothing off"
    assert wrapper.schedule(110.0) == [first, second]
    wrapper.append_audio(silent, noise(30), 106.0)
    assert (wrapper.due_ms, wrapper.schedule(106.0)) == (100.0, [first, second, silent]), "all are there: nobody waits"


def test_a_full_step_starts_at_once_without_the_last_streams():
    wrapper = company(wait_ms=10.0, max_rows=2).wrapper
    sessions = [wrapper.open_session() for _ in range(4)]
    for number in (2, 0, 1):
        wrapper.append_audio(sessions[number], noise(30), float(number))
    assert wrapper.schedule(2.0) == [sessions[0], sessions[1]]


def test_live_streams_go_before_recordings_until_those_have_waited_long():
    wrapper = company(wait_ms=0.0, max_rows=1).wrapper
    recording, caller = wrapper.open_session(live=False), wrapper.open_session()
    wrapper.append_audio(recording, noise(400), 0.0)
    wrapper.append_audio(caller, noise(30), 500.0)
    assert wrapper.schedule(500.0) == [caller]
    wrapper.close_session(caller)
    late = wrapper.open_session()
    wrapper.append_audio(late, noise(30), 1_200.0)
    assert wrapper.schedule(1_200.0) == [recording]


def test_more_audio_does_not_delay_a_ready_stream():
    wrapper = company(wait_ms=10.0).wrapper
    caller, _ = wrapper.open_session(), wrapper.open_session()
    for at in range(5):
        wrapper.append_audio(caller, noise(30), 100.0 + 3 * at)
    assert wrapper.due_ms == 110.0
    wrapper.step(wrapper.schedule(112.0), 112.0)
    assert wrapper.due_ms == 122.0, "and after its turn others have theirs"


def test_recordings_take_one_chunk_while_a_live_stream_is_open():
    wrapper = company(wait_ms=0.0).wrapper
    recording, caller = wrapper.open_session(live=False), wrapper.open_session()
    wrapper.append_audio(recording, noise(400), 0.0)
    wrapper.append_audio(caller, noise(1), 1_000.0)
    for now_ms, frames in ((1_000.0, 4), (5_999.0, 8), (6_000.0, 40)):
        wrapper.step(wrapper.schedule(now_ms), now_ms)
        assert recording.audio_buffer.seen_frames == frames


def test_a_step_of_many_chunks_is_bounded():
    wrapper = company(wait_ms=0.0, bulk_frames=2 * 8 * 4).wrapper
    recordings = [wrapper.open_session(live=False) for _ in range(3)]
    for each in recordings:
        wrapper.append_audio(each, noise(100), 0.0)
    assert wrapper.schedule(0.0) == recordings[:2]
    for each in recordings:
        wrapper.append_audio(each, noise(100), 0.0)
    wrapper = company(wait_ms=0.0, bulk_frames=1).wrapper
    wrapper.append_audio(wrapper.open_session(live=False), noise(100), 0.0)
    assert len(wrapper.schedule(0.0)) == 1


class Watched:
    """A model, and where the audio of its steps lay."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.addresses: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def step(self, chunk: StreamingChunk, state: State) -> torch.Tensor:
        self.addresses.add(chunk.pcm.data_ptr())
        return self._model.step(chunk, state)


def test_steps_of_all_shapes_have_their_audio_in_the_same_memory():
    watched = Watched(model("deepspeech"))
    host = Company(watched, "ctc", 4, chunked=True, slots=12)
    host.hear(clips(2, 14), random.Random(2))
    assert len(set(host.search.batches)) > 4
    assert len(watched.addresses) == 1


class Replaying:
    """What a device does that records steps: arguments are copied in, and a new shape runs more than once."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.inputs: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def padded_rows(self, live: int) -> int:
        return 1 << (live - 1).bit_length()

    def capture(self, function: Any) -> Any:
        def replayed(*came: torch.Tensor) -> Any:
            key = tuple(each.shape for each in came)
            if key not in self.inputs:
                self.inputs[key] = [each.clone() for each in came]
                for _ in range(3):
                    function(*self.inputs[key])
            for into, each in zip(self.inputs[key], came, strict=True):
                into.copy_(each)
            return function(*self.inputs[key])

        return replayed


@pytest.mark.parametrize("search", ["ctc beam", "rnnt"])
def test_recorded_steps_have_the_same_results(search: str):
    name = "fastconformer 8,1"
    want = alone(name, search, 4, 2)
    host = Company(model(name), search, 2, chunked=True, device=Replaying(model(name).device))
    got = host.hear(clips(4), random.Random(5))
    assert len(host.wrapper.device.inputs) > 2
    for number, each in want.items():
        assert [t[:2] for t in got[number].tokens] == [t[:2] for t in each.tokens]


class Elsewhere(StreamingEncoder):
    """A device that is not the host, with a model that says nothing there."""

    frame_block, frame_samples, vocab_size, blank_id, heads, encode_frames = 1, 320, 3, 2, ("ctc",), 64
    torch_device = torch.device("meta")

    def padded_rows(self, live: int) -> int:
        return live

    def count_frames(self, samples: int) -> int:
        return samples // 320

    def audio_window(self, chunk: int) -> AudioWindow:
        return AudioWindow(0, 320 * chunk)

    def state_specs(self, chunk: int) -> dict[str, StateSpec]:
        return {"h": StateSpec((2,))}

    def step(self, chunk: StreamingChunk, state: State) -> torch.Tensor:
        assert {each.device.type for each in (*chunk, *state.values())} == {"meta"}
        return torch.empty(len(chunk.rows), 4, 2, device="meta")


def test_a_step_that_is_not_recorded_has_its_audio_on_the_device():
    from tiny_streaming import Silent

    there = Elsewhere()
    wrapper = ChunkedModelRunner(there, Silent(there), there, slots=2, chunk=4, graphs=False)
    session = wrapper.open_session()
    wrapper.append_audio(session, noise(4), 0.0)
    assert [each.session for each in wrapper.step([session], 0.0)] == [session]


def test_a_recording_takes_many_chunks_at_once():
    host = company(wait_ms=0.0)
    recording = host.wrapper.open_session(live=False)
    host._tokens[recording] = []
    host.wrapper.append_audio(recording, noise(100), 0.0)
    host.advance()
    assert recording.audio_buffer.seen_frames == 8 * 4
    host.wrapper.close_session(recording)


def steps_of(lengths: list[int], **options) -> tuple[list[int], list[int]]:
    """Of recordings of so many frames that are heard together, nobody speaking: how many sessions were in each
    step of many chunks, and in each step of one."""
    host = company(wait_ms=0.0, **options)
    wrapper, many, one = host.wrapper, [], []
    sessions = [wrapper.open_session(live=False) for _ in lengths]
    for session, frames in zip(sessions, lengths, strict=True):
        samples = 320 * (frames - 2) + 512
        assert wrapper.model.count_frames(samples) == frames
        host._tokens[session] = []
        wrapper.append_audio(session, noise(frames + 2)[:samples], 0.0)
        wrapper.finish_audio(session, 0.0)
    while running := wrapper.schedule(0.0):
        before = running[0].audio_buffer.seen_frames
        wrapper.step(running, 0.0)
        (many if running[0].audio_buffer.seen_frames - before > 4 else one).append(len(running))
    assert [session.audio_buffer.seen_frames for session in sessions] == lengths
    return many, one


def test_the_rest_of_a_recording_does_not_cut_up_the_steps_of_others():
    assert steps_of([320]) == ([1] * 10, [])
    many, one = steps_of([320, 40, 320])
    assert many == [3] + [2] * 9, "what is left of the second is no reason to take the others in pieces"
    assert one == [1, 1]
    assert steps_of([320, 320 + 17]) == ([2] * 10 + [1], []), "a rest of more than half a step is one"
    assert steps_of([6, 8]) == ([], [2, 2]), "those that are short go together"


def test_sequential_is_one_session_after_another():
    host = company(chunked=False)
    host.hear(clips(1), random.Random(1))
    assert set(host.search.batches) == {1}


def test_memory_bounds_the_sessions():
    from asr_serve.engine.state_cache import state_row_bytes

    one = state_row_bytes(company().wrapper.states.specs)
    assert company(slots=100, kv_bytes=7 * one + 1).wrapper.free_sessions == 7
    assert company(slots=3, kv_bytes=7 * one).wrapper.free_sessions == 3
    assert company(slots=3, kv_bytes=1).wrapper.free_sessions == 1


def test_a_session_goes_on_in_another_wrapper():
    """What `save` gives is all that there is to know, but for where the session stands."""
    network, clip = model("fastconformer 8,1"), clips(5)[0][:32_000]
    want = Company(network, "rnnt", 2, chunked=False).hear([clip], random.Random(0))[0]
    here, there = (Company(network, "rnnt", 2, chunked=True) for _ in range(2))
    there.wrapper.open_session()
    first = here.wrapper.open_session()
    tokens = []
    for at in range(0, 16_000, 800):
        here.wrapper.append_audio(first, clip[at : at + 800], 1e3)
        while running := here.wrapper.schedule(1e9):
            tokens += here.wrapper.step(running, 1e3)[0].result.fixed_tokens
    second = there.wrapper.load_session(here.wrapper.save_session(first), live=True)
    there.wrapper.append_audio(second, clip[16_000:], 1e3)
    there.wrapper.finish_audio(second, 1e3)
    while running := there.wrapper.schedule(1e9):
        tokens += there.wrapper.step(running, 1e3)[0].result.fixed_tokens
    assert [t[:2] for t in tokens] == [t[:2] for t in want.tokens]
