"""Who said each word, and segments that end where the speaker changes."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import msgspec

from asr_serve.types import Segment, SpeakerTurn, Word

KEPT_SHARE = 0.5
"""Of a word that falls to another speaker, so much has to lie in that one's turns more than in the last one's:
where two speak at once, a sentence stays with whoever has begun it."""


class TurnIndex:
    """Looked up by time."""

    def __init__(self, turns: Sequence[SpeakerTurn]) -> None:
        self._turns = sorted(turns, key=lambda turn: turn.start_samples)
        self._starts = [turn.start_samples for turn in self._turns]
        self._longest = max((turn.end_samples - turn.start_samples for turn in self._turns), default=0)

    def shares(self, start: int, end: int) -> dict[str, float]:
        """How much of start..end each speaker speaks: 0 to 1 of its length. Those who do not are left out."""
        found: dict[str, float] = {}
        first = bisect.bisect_left(self._starts, start - self._longest)
        for turn in self._turns[first : bisect.bisect_left(self._starts, end)]:
            common = min(end, turn.end_samples) - max(start, turn.start_samples)
            if common > 0:
                found[turn.speaker] = found.get(turn.speaker, 0.0) + common / max(1, end - start)
        return found

    def speaker(self, start: int, end: int, last: str = "") -> str:
        """Who says what is said from start to end; `last` is who spoke before. Where nobody is known to speak,
        whoever does next to it. Empty where nobody ever does."""
        shares = self.shares(start, end)
        if not shares:
            near = min(self._turns, key=lambda t: max(t.start_samples - end, start - t.end_samples), default=None)
            return near.speaker if near else ""
        best = max(shares, key=lambda name: (shares[name], name == last))
        if last in shares and shares[best] - shares[last] < KEPT_SHARE:
            return last
        return best


def split_by_speaker(segment: Segment, turns: TurnIndex, words: bool) -> list[Segment]:
    """The segment as those that said it: one for each stretch of words of one speaker, or itself where it has no
    words, by whoever speaks in most of it. `words`: whether they are to be told."""
    if not segment.words:
        return [
            msgspec.structs.replace(segment, speaker=turns.speaker(segment.start_samples, segment.end_samples))
        ]
    last, said = "", list[Word]()
    for word in segment.words:
        last = turns.speaker(word.start_samples, word.end_samples, last)
        said.append(msgspec.structs.replace(word, speaker=last))
    runs = [0, *(i for i in range(1, len(said)) if said[i].speaker != said[i - 1].speaker), len(said)]
    if len(runs) == 2:
        return [msgspec.structs.replace(segment, speaker=last, words=tuple(said) if words else ())]
    return [_part(segment, said, first, after, words) for first, after in itertools.pairwise(runs)]


def _part(segment: Segment, said: list[Word], first: int, after: int, words: bool) -> Segment:
    """Which of its tokens are in it is not known here: it has none."""
    cuts = _cuts(segment.text, said)
    start = segment.start_samples if not first else said[first].start_samples
    end = segment.end_samples if after == len(said) else said[after - 1].end_samples
    return msgspec.structs.replace(
        segment,
        start_samples=start,
        end_samples=max(start, end),
        text=segment.text[cuts[first] : cuts[after]].strip(),
        tokens=(),
        logprobs=(),
        speaker=said[first].speaker,
        words=tuple(said[first:after]) if words else (),
    )


def _cuts(text: str, said: Sequence[Word]) -> list[int]:
    """Where each word begins in the text, and its end."""
    cuts, position = [], 0
    for word in said:
        found = text.find(word.text, position)
        cuts.append(position if found < 0 else found)
        position = cuts[-1] + (0 if found < 0 else len(word.text))
    return [0, *cuts[1:], len(text)]
