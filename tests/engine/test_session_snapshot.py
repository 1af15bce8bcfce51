"""A session that is saved and goes on elsewhere is, bit for bit, the one that never was; odd bytes are refused."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from case_tiers import exhaustive_after
from tiny_streaming import SEARCHES, clips, model

from asr_serve.decoding.attention_rescoring import AttentionRescoringSearch
from asr_serve.decoding.biasing_list import StreamingBiasingList
from asr_serve.decoding.ctc import CtcBeamOptions, CtcPrefixBeam
from asr_serve.decoding.ctc_batched import BIASING_NODE, LANGUAGE_STATE, BatchedCtcPrefixBeam
from asr_serve.decoding.language_model.kneser_ney import train
from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
from asr_serve.decoding.language_model.token_models import TokenLanguageModel
from asr_serve.decoding.rnnt_beam import TransducerBeam
from asr_serve.engine.session_snapshot import SessionSnapshot
from asr_serve.engine.streaming.model_runner import ChunkedModelRunner, StreamingSession
from asr_serve.engine.streaming.search_router import BiasedBeamSearch, BiasingSearchRouter
from asr_serve.engine.streaming.token_aligner import COLUMNS
from asr_serve.models.interfaces import UNBOUNDED_SAMPLES, SearchToken

CASES = [
    ("fastconformer 8,1", "ctc"),
    ("fastconformer 8,1", "ctc beam"),
    ("fastconformer 8,1", "ctc batched"),
    ("fastconformer 8,1", "rnnt"),
    ("fastconformer 8,3", "rnnt beam"),
    ("tdt 8,1", "rnnt"),
    ("u2pp 2", "ctc beam"),
    ("u2pp 2", "rescored"),
    ("u2pp 2", "batched and rescored"),
    ("deepspeech", "ctc"),
    ("moonshine", "none"),
]


RESCORED = {"rescored": "ctc beam", "batched and rescored": "ctc batched"}
"""Searches whose n-best list is rescored, by name."""


def wrapper(name: str, search: str, blocks: int = 1, **options: Any) -> ChunkedModelRunner:
    network = model(name)
    made = SEARCHES[RESCORED.get(search, search)](network)
    if search in RESCORED:
        made = AttentionRescoringSearch(made, network)
    return ChunkedModelRunner(
        network, made, network.device, slots=4, chunk=blocks * network.frame_block, poison=True, **options
    )


class Heard:
    """A session and what it says; it moves when it is told to."""

    def __init__(self, wrapper: ChunkedModelRunner) -> None:
        self.wrapper = wrapper
        self.session: StreamingSession = wrapper.open_session()
        self.tokens: list[SearchToken] = []
        self.tails: list[list[SearchToken]] = []

    def write(self, pcm: np.ndarray, last: bool) -> None:
        self.wrapper.append_audio(self.session, pcm, 0.0)
        if last:
            self.wrapper.finish_audio(self.session, 0.0)

    def step(self) -> bool:
        if not (running := self.wrapper.schedule(1e9)):
            return False
        ((_, found),) = self.wrapper.step(running, 0.0)
        self.tokens += found.fixed_tokens
        self.tails.append(found.tail_tokens)
        return True

    def move(self, to: ChunkedModelRunner) -> None:
        saved = self.wrapper.save_session(self.session)
        self.wrapper.close_session(self.session)  # what it leaves behind is poison
        to.open_session()  # so that it is another row
        self.wrapper, self.session = to, to.load_session(saved, live=True)
        assert to.save_session(self.session) == saved


@pytest.mark.slow
@pytest.mark.parametrize(("name", "search"), CASES)
@pytest.mark.parametrize("blocks", exhaustive_after(1, [3, 1]))
def test_a_restored_session_continues_bit_for_bit(name: str, search: str, blocks: int) -> None:
    said = 0
    for seed in range(3):
        chance = random.Random(seed)
        clip = clips(seed)[(0, 1, 4)[seed]]
        stays, moves = Heard(wrapper(name, search, blocks)), Heard(wrapper(name, search, blocks))
        at, last = 0, False
        while not stays.session.finished:
            piece = chance.choice((1, 160, 5_121, 20_000))
            if not last:
                last = at + piece >= len(clip)
                for each in (stays, moves):
                    each.write(clip[at : at + piece], last)
                at += piece
            for _ in range(chance.choice((0, 1, 2, 100))):  # also with chunks that wait
                moves.move(wrapper(name, search, blocks))
                assert stays.step() == moves.step()
                if moves.session.ready_since_ms is None:
                    break
            assert moves.wrapper.save_session(moves.session) == stays.wrapper.save_session(stays.session)
        moves.move(wrapper(name, search, blocks))
        assert (moves.tokens, moves.tails) == (stays.tokens, stays.tails)
        assert moves.session.finished
        assert moves.session.hypotheses == stays.session.hypotheses
        said += len(moves.tokens) + len(moves.session.hypotheses[0].tokens)
    assert said > 1 or search == "none", "the model is silent"


def test_a_row_is_copied_once() -> None:
    here = wrapper("fastconformer 8,1", "rnnt")
    session = here.open_session()
    held = here.saved_view(session)
    here.states.tensors["audio"][session.slot.row, 0] = 7.0
    first = next(iter(here.states.specs))
    assert first == "audio"
    assert np.frombuffer(held.parts[0], np.float32)[0] == 7.0, "it is looked at where it lies"
    assert np.frombuffer(held.to_snapshot().parts[0], np.float32)[0] == 7.0
    saved = here.save_session(session)
    here.states.tensors["audio"][session.slot.row, 0] = 8.0
    assert np.frombuffer(saved.parts[0], np.float32)[0] == 7.0, "what is saved does not change"


def test_the_search_drops_a_closed_session() -> None:
    here = wrapper("u2pp 2", "rescored")
    session = here.open_session()
    here.append_audio(session, clips(3)[0][:16_000], 0.0)
    while running := here.schedule(1e9):
        here.step(running, 0.0)
    assert here.search._hidden
    here.close_session(session)
    assert not here.search._hidden
    assert not here.search._fixed


@pytest.fixture(scope="module")
def saved() -> SessionSnapshot:
    here = wrapper("fastconformer 8,1", "rnnt")
    session = here.open_session()
    here.append_audio(session, np.concatenate(clips(3)), 0.0)
    here.step(here.schedule(1e9), 0.0)
    assert session.audio_buffer.unbuffered.size
    return here.save_session(session)


def numbers(saved: SessionSnapshot, **changes: Any) -> SessionSnapshot:
    layout, place, guesses, evidence, hot = msgspec.msgpack.decode(saved.header)
    known = dict(zip(("seen", "samples", "filled", "ended"), place, strict=True))
    guesses, evidence = changes.pop("guesses", guesses), changes.pop("evidence", evidence)
    place = tuple((known | changes).values())
    return msgspec.structs.replace(saved, header=msgspec.msgpack.encode((layout, place, guesses, evidence, hot)))


def parts(saved: SessionSnapshot, change: Any) -> SessionSnapshot:
    found = list(saved.parts)
    change(found)
    return msgspec.structs.replace(saved, parts=tuple(found))


HOSTILE = {
    "no numbers": lambda s: msgspec.structs.replace(s, header=b""),
    "other numbers": lambda s: msgspec.structs.replace(s, header=msgspec.msgpack.encode({"seen": 1})),
    "noise": lambda s: msgspec.structs.replace(s, header=bytes(range(200, 256))),
    "a layout of another model": lambda s: wrapper_saved("tdt 8,1"),
    "another chunk": lambda s: wrapper_saved("fastconformer 8,1", 40),
    "no parts": lambda s: msgspec.structs.replace(s, parts=()),
    "a part less": lambda s: parts(s, lambda p: p.pop()),
    "a part more": lambda s: parts(s, lambda p: p.append(b"")),
    "a short row": lambda s: parts(s, lambda p: p.__setitem__(0, p[0][:-1])),
    "a long row": lambda s: parts(s, lambda p: p.__setitem__(2, p[2] + b"x")),
    "rows in another order": lambda s: parts(s, lambda p: p.insert(0, p.pop(1))),
    "half a sample": lambda s: parts(s, lambda p: p.__setitem__(-2, p[-2] + b"x")),
    "a sample more": lambda s: parts(s, lambda p: p.__setitem__(-2, p[-2] + bytes(4))),
    "half a frame": lambda s: parts(s, lambda p: p.__setitem__(-1, p[-1] + b"x")),
    "seen less than nothing": lambda s: numbers(s, seen=-1),
    "seen more": lambda s: numbers(s, seen=3),
    "samples without end": lambda s: numbers(s, samples=UNBOUNDED_SAMPLES),
    "a row more than full": lambda s: numbers(s, filled=1 << 20, samples=16_000 + (1 << 20)),
    "a negative fill": lambda s: numbers(s, filled=-1),
    "over, and not ended": lambda s: numbers(s, guesses=[((), 0.0)]),
    "a guess that is none": lambda s: numbers(s, ended=True, guesses=["no"]),
    "evidence that is none": lambda s: numbers(s, evidence=["no"]),
    "times of more tokens than there are": lambda s: numbers(s, evidence=([], [(1, 2)], 0)),
    "frames of nobody": lambda s: parts(s, lambda p: p.__setitem__(-1, bytes(4 * COLUMNS))),
    "a frame too many": lambda s: parts(
        numbers(s, evidence=([], [], 0)), lambda p: p.__setitem__(-1, bytes(4 * COLUMNS * 1_000))
    ),
}


def wrapper_saved(name: str, blocks: int = 1) -> SessionSnapshot:
    here = wrapper(name, "rnnt", blocks)
    return here.save_session(here.open_session())


@pytest.mark.parametrize("chosen", exhaustive_after(1, ["both", "hotwords", "language model"]))
@pytest.mark.parametrize(("name", "plain"), [("fastconformer 8,1", name) for name in ("ctc", "ctc batched", "rnnt")])
def test_a_restored_session_keeps_its_hot_words_and_language_model(name: str, plain: str, chosen: str) -> None:
    def made() -> ChunkedModelRunner:
        network = model(name)
        options: dict[str, Any] = {"boost": 3.0, "fuses": True}
        biased: dict[str, BiasedBeamSearch] = {
            "ctc": CtcPrefixBeam(network, 4, **options),
            "ctc batched": BatchedCtcPrefixBeam(network, network.device, CtcBeamOptions(4), **options),
            "rnnt": TransducerBeam(network.transducer, 3, **options),
        }
        search = BiasingSearchRouter(SEARCHES[plain](network), biased[plain])
        chunk = 2 * network.frame_block
        return ChunkedModelRunner(network, search, network.device, slots=4, chunk=chunk, poison=True)

    def end(there: ChunkedModelRunner, session: StreamingSession) -> list[Any]:
        there.append_audio(session, np.concatenate(clips(2)), 0.0)
        there.finish_audio(session, 0.0)
        told = []
        while not session.finished:
            told += [each.result for each in there.step(there.schedule(1e9), 0.0)]
        return [told, session.hypotheses]

    vocab = model(name).vocab_size
    words = StreamingBiasingList(
        "ab\t10\nba\t10", lambda text: [ord(c) % (vocab - 1) for c in text.lower()], str, vocab
    )
    text = [[str(token % vocab) for token in range(start, start + 9)] for start in range(20)]
    ngrams = train(text, 3).to_model().for_tokens([str(token) for token in range(vocab)])
    language_model = TokenLanguageModel(NgramScorer(ngrams), b"contents").with_weight(0.5)
    options = {"biasing": words if chosen != "language model" else None}
    options |= {"language_model": language_model if chosen != "hotwords" else None}
    here, there = made(), made()
    session = here.open_session(**options)
    here.append_audio(session, np.concatenate(clips(3)), 0.0)
    while ready := here.schedule(1e9):
        here.step(ready, 0.0)
    saved = here.save_session(session)
    others = [{}, options | {"biasing": None if chosen != "language model" else words}]
    others += [options | {"language_model": TokenLanguageModel(NgramScorer(ngrams), b"contents").with_weight(0.6)}]
    for other in others:
        with pytest.raises(ValueError, match="other hotwords, or another language model"):
            there.load_session(saved, live=True, **other)
    assert there.free_sessions == there.states.slots
    moved = there.load_session(saved, live=True, **options)
    assert end(there, moved) == end(here, session)
    names = {
        "ctc": {"hotwords": "ctc_spots", "language model": "ctc_contexts"},
        "ctc batched": dict.fromkeys(("hotwords", "language model"), "ctc_numbers"),
        "rnnt": {"hotwords": "spot", "language model": "language_state"},
    }[plain]
    planes = {"hotwords": BIASING_NODE, "language model": LANGUAGE_STATE}
    for each in names if chosen == "both" else [chosen]:
        state = there._search[f"hot.{names[each]}"]
        assert (state[:, planes[each]] > 0 if plain == "ctc batched" else state).any()


@pytest.mark.parametrize("how", HOSTILE)
def test_foreign_snapshots_are_refused(saved: SessionSnapshot, how: str) -> None:
    there = wrapper("fastconformer 8,1", "rnnt")
    with pytest.raises(ValueError, match=r"saved|snapshot|session"):
        there.load_session(HOSTILE[how](saved), live=True)
    assert there.free_sessions == there.states.slots, "nobody has a slot"
    there.states.check()
    there.close_session(there.load_session(saved, live=True))


@pytest.mark.parametrize("how", ["numbers", "fewer", "dtype"])
def test_search_states_that_cannot_be_are_refused(how: str) -> None:
    here, there = wrapper("u2pp 2", "rescored"), wrapper("u2pp 2", "rescored")
    session = here.open_session()
    here.append_audio(session, clips(3)[0][:16_000], 0.0)
    while running := here.schedule(1e9):
        here.step(running, 0.0)
    made = here.save_session(session)
    width, dtype, fixed = msgspec.msgpack.decode(made.parts[-2])
    assert dtype == "fp32"
    changed = {
        "numbers": lambda p: p.__setitem__(-2, b"\xc1"),
        "fewer": lambda p: p.__setitem__(-1, p[-1][: -4 * width]),
        "dtype": lambda p: p.__setitem__(-2, msgspec.msgpack.encode((width, "bf16", fixed))),
    }[how]
    with pytest.raises(ValueError, match=r"saved search|bytes of"):
        there.load_session(parts(made, changed), live=True)
    assert there.free_sessions == there.states.slots
    there.load_session(made, live=True)


def test_every_kind_of_state_is_serialized() -> None:
    from asr_serve.engine.state_cache import copy_into_tensor, tensor_bytes

    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.bool, torch.int64, torch.float16):
        row = torch.arange(24).view(2, 3, 4).to(dtype)
        other = torch.zeros_like(row)
        copy_into_tensor(other, bytes(tensor_bytes(row)))
        assert torch.equal(row, other)
