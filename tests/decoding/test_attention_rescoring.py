"""A second decoder puts the n-best list in order; rows that are used again remember nothing."""

from __future__ import annotations

import pytest
import torch

from asr_serve.decoding import attention_rescoring
from asr_serve.decoding.attention_rescoring import AttentionRescoringSearch
from asr_serve.models.interfaces import UNBOUNDED_SAMPLES, NBestHypothesis, SearchResult, SearchToken, StreamingChunk


def token(id: int) -> SearchToken:
    return SearchToken(id, 0, -0.1)


class TwoGuesses:
    """Fixes one token a step; at the end it likes 1 more than 2."""

    def state_specs(self):
        return {}

    def step(self, hidden, chunk, state):
        return [SearchResult([token(int(row))], []) for row in chunk.rows]

    def finish(self, row, state):
        return [NBestHypothesis([token(1)], -1.0), NBestHypothesis([token(2)], -2.0)]


class Decoder:
    """Likes 2 more than 1, and remembers what it was asked."""

    ctc_weight = 0.5

    def __init__(self) -> None:
        self.asked = []

    def rescore(self, hidden, guesses):
        self.asked.append((hidden[:, 0].tolist(), guesses))
        return [-5.0, -1.0]


def chunk(rows: list[int], seen: list[int], frames: list[int]) -> StreamingChunk:
    given = [torch.tensor(each) for each in (rows, seen, frames)]
    return StreamingChunk(torch.zeros(len(rows), 1), *given, torch.full((len(rows),), UNBOUNDED_SAMPLES))


def test_the_rescoring_decoder_decides_from_all_audio_of_its_own_session():
    decoder = Decoder()
    search = AttentionRescoringSearch(TwoGuesses(), decoder)
    lent = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    search.step(lent, chunk([5, 6], [0, 0], [2, 1]), {})
    lent.fill_(7.0)
    search.step(lent[1:], chunk([5], [2], [2]), {})
    best = search.finish(5, {})
    assert [guess.tokens[0].id for guess in best] == [2, 1]
    assert decoder.asked == [([1.0, 2.0, 7.0, 7.0], [[5, 5, 1], [5, 5, 2]])]
    search.finish(6, {})
    assert decoder.asked[1] == ([3.0], [[6, 1], [6, 2]])


def test_the_search_has_the_weights_of_the_model():
    decoder = Decoder()
    decoder.ctc_weight = 100.0
    search = AttentionRescoringSearch(TwoGuesses(), decoder)
    search.step(torch.zeros(1, 1, 1), chunk([0], [0], [1]), {})
    assert search.finish(0, {})[0].tokens[0].id == 1


@pytest.mark.parametrize("frames", [0, 3])
def test_a_reused_row_starts_empty(frames):
    decoder = Decoder()
    search = AttentionRescoringSearch(TwoGuesses(), decoder)
    search.step(torch.ones(1, 4, 1), chunk([0], [0], [4]), {})  # its session leaves without an end
    search.step(torch.zeros(1, 3, 1), chunk([0], [0], [frames]), {})
    search.finish(0, {})
    assert [hidden for hidden, _ in decoder.asked] == ([[0.0] * frames] if frames else [[]])


def test_a_session_past_the_limit_is_not_rescored(monkeypatch):
    monkeypatch.setattr(attention_rescoring, "MOST_FRAMES", 5)
    decoder = Decoder()
    search = AttentionRescoringSearch(TwoGuesses(), decoder)
    for seen in (0, 4, 8):
        search.step(torch.zeros(1, 4, 1), chunk([0], [seen], [4]), {})
    assert [guess.tokens[0].id for guess in search.finish(0, {})] == [1, 2]
    assert not decoder.asked
