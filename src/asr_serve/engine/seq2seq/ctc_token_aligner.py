"""Times of the tokens of a speech LLM, from the CTC head over its audio encoder.

The head has a vocabulary of its own: it aligns the text of an answer, and the characters of that text carry the times
over to the language model's tokens.

Source: funasr 1.4.16, FunASRNano.inference_llm, which reports the times of the head's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from asr_serve.decoding.ctc_alignment import align_columns
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.engine.seq2seq.token_aligner import Answer, FinishedRow
from asr_serve.models.interfaces import CtcHead
from asr_serve.text.tokenizers import token_texts
from asr_serve.text.word_timing import is_spoken_character

Times = tuple[tuple[int, int], ...]


class CtcTokenAligner:
    """Token times from a CTC head. `text`: text of tokens of the language model."""

    def __init__(self, head: CtcHead, text: Callable[[list[int]], str]) -> None:
        self._head, self._text = head, text

    def add_times(self, ended: Sequence[FinishedRow]) -> list[FinishedRow]:
        """Returns the rows, with token times in answers and hypotheses that need them."""
        return [
            each
            if each.row.ctc_frames is None
            else each._replace(recognition=self.with_times(each.recognition, each.row.ctc_frames, each.samples))
            for each in ended
        ]

    def with_times(self, answer: Recognition, frames: Tensor, samples: int) -> Recognition:
        """Returns the answer with the times of its tokens, and those of its hypotheses. `frames` (n, width): those of
        the head. `samples`: length of the audio."""

        def timed(each: Answer) -> Answer:
            return msgspec.structs.replace(each, times=self.token_times(each.tokens, frames, samples))

        return msgspec.structs.replace(timed(answer), hypotheses=tuple(map(timed, answer.hypotheses)))

    @torch.inference_mode()
    def token_times(self, tokens: Sequence[int], frames: Tensor, samples: int) -> Times:
        """Returns the start and end of each token in samples; nothing where the text needs more frames than there are,
        as a hallucinated one may."""
        head, text = self._head, self._text(list(tokens))
        labels = head.encode(text)
        if not labels:
            return ()
        distinct = sorted({head.blank_id, *labels})
        # Logits of these columns are enough (see CtcHead.scores); a large vocabulary's would take longer than encoding.
        logits = head.scores(frames, distinct).float().cpu().numpy()
        column = {label: index for index, label in enumerate(distinct)}
        chosen = logits[:, [column[label] for label in labels]]
        try:
            spans = align_columns(logits[:, column[head.blank_id]], chosen, labels).spans
        except ValueError:
            return ()
        edges = np.array(spans, np.float64) * head.frame_samples
        starts, ends = _character_times(text, _groups(labels, head.decode, len(text)), edges)
        return _times_of_tokens(len(tokens), _groups(tokens, self._text, len(text)), starts, ends, samples)


class _Group(NamedTuple):
    """Characters of a text, `first` up to but not including `behind`, and the tokens that spell them together."""

    first: int
    behind: int
    tokens: range
    own: list[int]
    """Spoken tokens among them: the last, and all before it but spaces."""


def _groups(tokens: Sequence[int], spell: Callable[[list[int]], str], characters: int) -> list[_Group]:
    """Groups of the tokens of a text: each token that adds characters, with those before it that add none. The last
    has what is left of the text: spaces at the end, and bytes of no character, may have another length among the
    tokens."""
    ends = [min(characters, end) for end in accumulate(map(len, token_texts(tokens, spell)))]
    last = max((token for token, end in enumerate(ends) if end > (ends[token - 1] if token else 0)), default=-1)
    found, at, first = list[_Group](), 0, 0
    for token, end in enumerate(ends):
        behind = characters if token == last else end
        if behind <= at:
            continue
        silent = [i for i in range(first, token) if not any(map(is_spoken_character, spell([tokens[i]])))]
        group = range(first, token + 1)
        found.append(_Group(at, behind, group, [i for i in group if i not in silent]))
        at, first = behind, token + 1
    return found


def _character_times(text: str, groups: Sequence[_Group], spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends (characters,) of the characters of a text, from the spans (tokens, 2) of the tokens in `groups`.
    What is not spoken takes no time, where a group has characters that are."""
    starts, ends = np.zeros(len(text)), np.zeros(len(text))
    for first, behind, _, own in groups:
        spoken = np.array([is_spoken_character(letter) for letter in text[first:behind]], np.float64)
        shares = spoken if spoken.any() else np.ones(behind - first)
        steps = np.concatenate([[0.0], np.cumsum(shares)]) / shares.sum()
        start, end = spans[own[0], 0], spans[own[-1], 1]
        starts[first:behind], ends[first:behind] = start + (end - start) * steps[:-1], start + (end - start) * steps[1:]
    return starts, ends


def _times_of_tokens(count: int, groups: Sequence[_Group], starts: np.ndarray, ends: np.ndarray, samples: int) -> Times:
    """Start and end of each of `count` tokens, from those of the characters that they spell: tokens that spell a
    character together divide its time."""
    times, latest = list[tuple[int, int]](), 0.0
    for first, behind, tokens, own in groups:
        start, end = max(latest, starts[first]), max(latest, ends[behind - 1])
        shares = np.cumsum([0, *(token in own for token in tokens)]) / len(own)
        edges = (start + (end - start) * shares).round().clip(0, samples).astype(int).tolist()
        times += pairwise(edges)
        latest = end
    at = times[-1][1] if times else 0
    return (*times, *((at, at) for _ in range(count - len(times))))  # tokens at the end may spell nothing
