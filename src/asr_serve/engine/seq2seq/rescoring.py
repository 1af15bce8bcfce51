"""Hot words that were not heard: an answer is said otherwise where one may stand, and the model is asked how
likely that is.

Source  rescoring of alternatives that sound alike, as in spelling correction for speech (arXiv:1902.07178), with
        the recogniser itself for a judge. The numbers were chosen on LibriSpeech's train speech, half of it in
        noise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from asr_serve.decoding.biasing import written_forms
from asr_serve.decoding.token_rules import TokenRule
from asr_serve.engine.seq2seq.biasing import MAX_RECORDED_TOKENS, RescoringList, WrittenForm
from asr_serve.engine.seq2seq.finalize import FinishedRow
from asr_serve.kernels import PAGE
from asr_serve.text.tokenizers import token_texts

if TYPE_CHECKING:
    from asr_serve.engine.seq2seq.decode_batch import ForwardInputs
    from asr_serve.engine.seq2seq.decoder import DecodeRunner


MAX_SCORING_POSITIONS = 256
"""Positions of a pass: enough to fill its products, few enough that nobody waits long for it."""


class ScoringInput(NamedTuple):
    """`tokens` from position `first` of an answer on, -1 being what comes before it; `asked`: behind each of them,
    the tokens whose natural-log probabilities are wanted."""

    finished: FinishedRow
    first: int
    tokens: tuple[int, ...]
    scored_tokens: Sequence[Sequence[int]]

    @property
    def position(self) -> int:
        return len(self.finished.row.prompt) + self.first

    @property
    def pages(self) -> range:
        """Of its row's table, those that it writes to."""
        return range(self.position // PAGE, (self.position + len(self.tokens) - 1) // PAGE + 1)


class AlternativeScorer:
    """Over the pages of a runner: those that rows had for a longer answer, then others that nobody has, not even
    the cache. Where they are too few for a feed, what its row has said from there on is no longer in its pages.
    """

    def __init__(self, runner: DecodeRunner) -> None:
        self._runner = runner

    def logprobs(self, feeds: Sequence[ScoringInput]) -> list[list[list[float]]]:
        """Of each feed and each of its tokens, what is asked."""
        found: list[list[list[float]]] = []
        left = self._spare_pages({id(feed.finished): feed.finished for feed in feeds}.values())
        for batch in self._batches(feeds, len(left) + self._unused):
            found += self._score_batch(batch, left)
        return found

    def has_pages(self, ended: Iterable[FinishedRow]) -> bool:
        """Whether there is a page at all for what is said of these."""
        return bool(self._spare_pages(ended)) or self._unused > 0

    @staticmethod
    def _spare_pages(ended: Iterable[FinishedRow]) -> list[int]:
        """Pages of these that their answers did not need: theirs, however many others there are."""
        return [
            page
            for each in ended
            for page in each.row.block_table[-(-(len(each.row.prompt) + len(each.recognition.tokens)) // PAGE) :]
        ]

    @property
    def _unused(self) -> int:
        return self._runner.page_pool.free_count - self._runner.page_pool.reclaimable_count

    def _batches(self, feeds: Sequence[ScoringInput], most: int) -> Iterator[list[ScoringInput]]:
        """`most`: pages of a pass."""
        batch, positions, pages = list[ScoringInput](), 0, 0
        for feed in feeds:
            positions, pages = positions + len(feed.tokens), pages + len(feed.pages)
            if batch and (positions > MAX_SCORING_POSITIONS or pages > most):
                yield batch
                batch, positions, pages = [], len(feed.tokens), len(feed.pages)
            batch.append(feed)
        if batch:
            yield batch

    def top_tokens(self, each: FinishedRow, count: int) -> list[dict[int, float]]:
        """What could have been said in place of each token of its answer, which is in its pages from then on."""
        feed = ScoringInput(each, -1, (each.row.prompt[-1], *each.recognition.tokens[:-1]), ())
        found: list[dict[int, float]] = []
        for first in range(0, len(feed.tokens), MAX_SCORING_POSITIONS):
            part = feed._replace(first=first - 1, tokens=feed.tokens[first : first + MAX_SCORING_POSITIONS])
            logits = self._runner.logits(self._inputs([part]), self._rules([part])).float()
            best = logits.topk(min(count, logits.shape[1]), dim=1)
            scores = best.values - logits.logsumexp(1, keepdim=True)
            rows = zip(best.indices.tolist(), scores.tolist(), strict=True)
            found += [dict(zip(*row, strict=True)) for row in rows]
        return found

    def _inputs(self, batch: Sequence[ScoringInput]) -> ForwardInputs:
        return self._runner.batch.rescoring_inputs(
            [feed.finished.row for feed in batch],
            [feed.tokens for feed in batch],
            [feed.position + 1 for feed in batch],
        )

    def _rules(self, batch: Sequence[ScoringInput]) -> list[TokenRule]:
        """For what comes behind each position, as when it was decoded."""
        starts, found = self._runner.prompts, list[TokenRule]()
        for feed in batch:
            row = feed.finished.row
            said = [*feed.finished.recognition.tokens[: max(0, feed.first)], *feed.tokens[feed.first < 0 :]]
            known = len(said) - len(feed.tokens) + 1
            ends = range(known, known + len(feed.tokens))
            found += [starts.rule(row, said[:end]) for end in ends]
        return found

    def _score_batch(self, batch: Sequence[ScoringInput], left: Sequence[int]) -> list[list[list[float]]]:
        """`left`: pages for it, before any are taken."""
        runner, at = self._runner, self._inputs(batch)
        wanted = sum(len(feed.pages) for feed in batch)
        more = max(0, wanted - len(left))
        fits = more <= self._unused
        taken = runner.page_pool.allocate(more) if fits else []
        try:
            if fits:
                self._assign_pages(batch, at.token_tables, [*left[:wanted], *taken])
            logits = runner.logits(at, self._rules(batch)).float()
        finally:
            runner.page_pool.free_pages(taken)
        counts = [len(asked) for feed in batch for asked in feed.scored_tokens]
        where = torch.arange(len(logits)).repeat_interleave(torch.tensor(counts)).to(logits.device)
        told = [token for feed in batch for asked in feed.scored_tokens for token in asked]
        tokens = torch.tensor(told, dtype=torch.int64, device=logits.device)
        scores = (logits[where, tokens] - logits.logsumexp(1)[where]).tolist()
        found: list[list[list[float]]] = []
        first = 0
        for feed in batch:
            found.append([])
            for asked in feed.scored_tokens:
                found[-1].append(scores[first : first + len(asked)])
                first += len(asked)
        return found

    def _assign_pages(self, batch: Sequence[ScoringInput], own: torch.Tensor, pages: Sequence[int]) -> None:
        """Each writes to pages of its own, the first of which begins as its row's does."""
        position, used, copies = 0, 0, []
        for feed in batch:
            its, end = feed.pages, position + len(feed.tokens)
            lent = pages[used : used + len(its)]
            own[position:end, its.start : its.stop] = torch.tensor(lent, dtype=own.dtype)
            copies.append((feed.finished.row.block_table[its.start], lent[0]))
            position, used = end, used + len(its)
        pool = self._runner.kv_cache
        sources, into = torch.tensor(copies, device=pool.device).T
        pool[into] = pool[sources]


MAX_SPAN_WORDS = 3
"""Of an answer that one hot word may have been heard as."""
MAX_PHRASE_WORDS = 6
"""Words of a hot word, as far as they were said one by one."""
MAX_PHONETIC_MATCHES = 6
"""Hot words that a stretch of an answer is compared with by their sounds."""
MAX_PHONETIC_DISTANCE = 0.5
"""From what was heard, in changes for each sound, of those that nothing but their sounds speaks for."""
MAX_LIKELY_DISTANCE = 0.7
"""Of those that the model holds for possible."""
MIN_FIRST_TOKEN_LOGPROB = -6.5
"""Natural-log probability of a first token, from which it may begin a hot word."""
PROBES_PER_WORD = 4
"""First tokens beside the one that was said that are tried in a word's place, on the average."""
MAX_CANDIDATES_PER_WORD = 32
"""Hot words that the model holds for possible in a word's place, on the average; of more, the likeliest. Of ten
thousand words Whisper and Moonshine held up to 6 for possible on LJSpeech, some of it in noise. Where thousands
begin with the same two tokens, as numbers of parts do, to compare the sounds of all took seconds of the loop."""
RESPELLING_DISTANCE = float("-inf")
"""As far from what was heard: only written otherwise."""
LOGPROB_FLOOR = -12.0
"""Natural-log probability at most of what is not among the likeliest of a place."""
WORD_EDGES = re.compile(r"^(\W*)(.*?)((?:['\u2019]s)?\W*)$", re.DOTALL)
"""What stands around a word."""


class RecognizedWord(NamedTuple):
    """A word of an answer: its tokens, from and to, and how it is written."""

    first: int
    end: int
    text: str


class WordSpan(NamedTuple):
    """Words of an answer together: its tokens, from and to, what stands before and behind, and the words."""

    first: int
    end: int
    before: str
    text: str
    behind: str


class HotwordCandidate(NamedTuple):
    """In place of a span. `far`: see SoundIndex.near; `score`: natural-log probability at most."""

    span: WordSpan
    word: int
    text: str
    phonetic_distance: float
    score: float


class FirstTokenProbe(NamedTuple):
    """A first token that was not said, in place of the word that begins there."""

    at: int
    token: int
    logprob: float


class CandidateGenerator:
    """Of one answer that has hot words: where one may stand."""

    def __init__(self, each: FinishedRow, heard: Sequence[RecognizedWord]) -> None:
        hot, fixed = each.row.hotwords, each.row.hypothesis.fixed
        assert isinstance(hot, RescoringList)
        self.finished, self.biasing_list, self.words = each, hot, heard
        self.respellings: list[tuple[WordSpan, str, int]] = []
        """Hot words that are there, but written otherwise."""
        self.spans: list[list[WordSpan]] = [[] for _ in heard]
        """By the word they begin with."""
        held = [
            (match[2].casefold() if (match := WORD_EDGES.match(word.text)) else "") in hot.known for word in heard
        ]
        most = min(max(MAX_SPAN_WORDS, hot.longest), MAX_PHRASE_WORDS)
        for i in range(len(heard)):
            for j in range(i + 1, min(i + most, len(heard)) + 1):
                if not heard[j - 1].text:
                    break
                match = WORD_EDGES.match(" ".join(word.text for word in heard[i:j]))
                if match is None or heard[i].first < fixed:
                    continue
                span = WordSpan(heard[i].first, heard[j - 1].end, *match.groups())
                if (known := hot.known.get(span.text.casefold())) is not None:
                    if len(written_forms(known.text)) == 1 and known.text != span.text:
                        self.respellings.append((span, known.text, hot.words.index(known)))
                elif not any(held[i:j]):
                    self.spans[i].append(span)

    def probes(self) -> list[FirstTokenProbe]:
        """Of the whole answer, likeliest first."""
        tokens, likeliest = self.finished.recognition.tokens, self.finished.row.top_tokens
        found = [
            FirstTokenProbe(i, token, logprob)
            for i, spans in enumerate(self.spans)
            if spans
            for token, logprob in likeliest.get(self.words[i].first, {}).items()
            if logprob > MIN_FIRST_TOKEN_LOGPROB
            and token in self.biasing_list.forms_by_first_token
            and token != tokens[self.words[i].first]
        ]
        found.sort(key=lambda probe: -probe.logprob)
        return found[: PROBES_PER_WORD * len(self.words)]

    def scoring_input(self, probe: FirstTokenProbe) -> ScoringInput:
        return ScoringInput(
            self.finished, self.words[probe.at].first, (probe.token,), (self._second_tokens(probe),)
        )

    def _second_tokens(self, probe: FirstTokenProbe) -> list[int]:
        return [
            form.tokens[1] for form in self.biasing_list.forms_by_first_token[probe.token] if len(form.tokens) > 1
        ]

    def candidates(self, probes: Sequence[tuple[FirstTokenProbe, Sequence[float]]]) -> list[HotwordCandidate]:
        """`probes`: with the natural-log probability of each second token. Each word and place once, in the
        place whose sounds fit best."""
        possible: list[tuple[int, WrittenForm, float]] = []
        for probe, seconds in probes:
            scores = iter(seconds)
            for form in self.biasing_list.forms_by_first_token[probe.token]:
                score = probe.logprob + (next(scores) if len(form.tokens) > 1 else 0.0)
                possible.append((probe.at, form, score))
        for i, spans in enumerate(self.spans):
            first = self.words[i].first
            for form in (
                self.biasing_list.forms_by_first_token.get(self.finished.recognition.tokens[first], ())
                if spans
                else ()
            ):
                possible.append((i, form, self._score(first, form.tokens)))
        possible = [each for each in possible if each[2] > LOGPROB_FLOOR]
        if len(possible) > (most := MAX_CANDIDATES_PER_WORD * len(self.words)):
            possible = sorted(possible, key=lambda each: -each[2])[:most]
        return self._likely_candidates(possible) + self._phonetic_candidates()

    def _score(self, first: int, tokens: Sequence[int]) -> float:
        """Natural-log probability at most, there, of what begins with these."""
        likeliest = self.finished.row.top_tokens
        score = likeliest.get(first, {}).get(tokens[0], LOGPROB_FLOOR)
        if len(tokens) > 1 and tokens[0] == self.finished.recognition.tokens[first]:
            score += likeliest.get(first + 1, {}).get(tokens[1], LOGPROB_FLOOR)
        return score

    def _likely_candidates(self, possible: Sequence[tuple[int, WrittenForm, float]]) -> list[HotwordCandidate]:
        spans = [span for spans in self.spans for span in spans]
        number = {span: i for i, span in enumerate(spans)}
        pairs = sorted({(number[span], form.word) for i, form, _ in possible for span in self.spans[i]})
        far = dict(
            zip(
                pairs,
                self.biasing_list.phonetic_index.distances([span.text for span in spans], pairs),
                strict=True,
            )
        )
        found = []
        for i, form, score in possible:
            near = min(self.spans[i], key=lambda span: far[number[span], form.word])
            for span in dict.fromkeys((near, self.spans[i][0])):
                if (distance := far[number[span], form.word]) <= MAX_LIKELY_DISTANCE:
                    found.append(HotwordCandidate(span, form.word, form.text, distance, score))
        return found

    def _phonetic_candidates(self) -> list[HotwordCandidate]:
        spans = [span for spans in self.spans for span in spans]
        near = self.biasing_list.phonetic_index.nearest(
            [span.text for span in spans], MAX_PHONETIC_MATCHES, MAX_PHONETIC_DISTANCE
        )
        return [
            HotwordCandidate(
                span, word, form, far, self._score(span.first, self.biasing_list.tokens_by_form[form])
            )
            for span, words in zip(spans, near, strict=True)
            for word, far in words
            for form in self._forms(self.biasing_list.words[word].text, span.text)
        ]

    def _forms(self, word: str, heard: str) -> list[str]:
        """What is not written with a capital begins with none, unless the caller says so."""
        return [form for form in written_forms(word) if form == word or form[:1].isupper() <= heard[:1].isupper()]


MAX_REPLACEMENTS = 24
"""At an answer of up to so many words; of a longer one, as many as it has words."""
TOKENIZED_FACTOR = 3
"""Times as many that are cut into tokens to see whether they are worth a look."""
CONTEXT_TOKENS = 4
"""Tokens behind the place that tell whether it fits."""
BASE_ALLOWANCE, DISTANCE_PENALTY = 7.2, 4.0
"""What a hot word of weight 1 may be less likely than what was heard, in natural-log probability; and by how much
less where all of its sounds are changed."""
SAME_STEM_PENALTY = 1.0
"""By how much less where it is what was heard with another ending: a model tells such words apart."""
LIST_SIZE_PENALTY, LIST_SIZE_SCALE = 1.0, 1_000
"""By how much less where it is one of so many more: 0.7 for a thousand, 2.4 for ten thousand."""
WEIGHT_GAIN = 2.0
"""For a weight e times as great: ten times is 4.6 more, and no weight makes a word of what sounds otherwise."""
RANK_PENALTY = 4.0
"""How much a change of all of its sounds puts a word behind others, of those that are looked at."""
NON_WORD = re.compile(r"[\W_]+")


class Replacement(NamedTuple):
    """An answer otherwise: `tokens` in place of those from `first` to `end`. `allowed`: how much less likely
    than what was heard it may be."""

    first: int
    end: int
    tokens: tuple[int, ...]
    allowance: float


def allowance(weight: float, far: float, *, same_stem: bool = False, words: int = 1) -> float:
    """How much less likely than what was heard a hot word may be, which is one of so many."""
    if far == RESPELLING_DISTANCE:
        return math.inf
    given = (
        BASE_ALLOWANCE + WEIGHT_GAIN * math.log(weight) - LIST_SIZE_PENALTY * math.log1p(words / LIST_SIZE_SCALE)
    )
    return given - DISTANCE_PENALTY * far - SAME_STEM_PENALTY * same_stem


def same_stem(one: str, other: str) -> bool:
    """Whether two words differ in their endings only: in up to three letters behind three or more."""
    one, other = one.casefold(), other.casefold()
    alike = 0
    while alike < min(len(one), len(other)) and one[alike] == other[alike]:
        alike += 1
    return max(len(one), len(other)) - alike <= 3 and alike >= 3


class ScoredReplacement(NamedTuple):
    """How much better it is than it must be, and the natural-log probabilities of its tokens."""

    margin: float
    replacement: Replacement
    logprobs: list[float]


class HotwordRescorer:
    """Over the pages of a runner: those of a row that has ended may be written anew."""

    def __init__(self, runner: DecodeRunner, text: Callable[[list[int]], str]) -> None:
        self._runner, self._text, self._scorer = runner, text, AlternativeScorer(runner)

    @torch.inference_mode()
    def rescore(self, ended: Sequence[FinishedRow]) -> list[FinishedRow]:
        """The same, with the hot words that the model finds about as likely."""
        told = list(ended)
        asked = [i for i, each in enumerate(ended) if self.applies(each)]
        if not asked:
            return told
        for each in (ended[i] for i in asked):
            if each.row.hypothesis.beam > 1:  # of what beams said, the row's own pages hold the beginning only
                each.row.top_tokens = dict(enumerate(self._scorer.top_tokens(each, MAX_RECORDED_TOKENS)))
        places = [CandidateGenerator(ended[i], self._words(ended[i].recognition.tokens)) for i in asked]
        looks = [self._replacements(*each) for each in zip(places, self._candidates(places), strict=True)]
        batch = [(which, look) for which, found in enumerate(looks) for look in found]
        # From the end on: where a row's own pages must do, what comes before a place is still in them.
        batch.sort(key=lambda pair: -pair[1].first)
        judged: list[list[ScoredReplacement]] = [[] for _ in asked]
        scores = self._score([(places[which].finished, look) for which, look in batch])
        for (which, look), (gain, logprobs) in zip(batch, scores, strict=True):
            if gain > -math.inf:  # what the model never says is no better for any allowance
                judged[which].append(ScoredReplacement(gain + look.allowance, look, logprobs))
        for i, found in zip(asked, judged, strict=True):
            told[i] = self._apply(ended[i], found)
        return told

    def applies(self, each: FinishedRow) -> bool:
        """It has hot words, and this is what its pages hold."""
        hypothesis, tokens = each.row.hypothesis, each.recognition.tokens
        return (
            isinstance(hypothesis.hotwords, RescoringList) and bool(tokens) and tokens == tuple(hypothesis.tokens)
        )

    # --- what to look at ----------------------------------------------------------------------------------

    def _words(self, tokens: Sequence[int]) -> list[RecognizedWord]:
        special = self._runner.prompts.special
        found: list[RecognizedWord] = []
        said = token_texts(list(tokens), self._text)
        for at, (token, text) in enumerate(zip(tokens, said, strict=True)):
            if special is not None and token >= special.eot:
                found.append(RecognizedWord(at, at, ""))
            elif not found or text[:1].isspace() or found[-1].first == found[-1].end:
                found.append(RecognizedWord(at, at + 1, text.strip()))
            else:
                found[-1] = RecognizedWord(found[-1].first, at + 1, found[-1].text + text)
        return found

    def _candidates(self, places: Sequence[CandidateGenerator]) -> list[list[HotwordCandidate]]:
        """First tokens are tried on pages of their own, where there are some: what rows said is needed yet."""
        room = self._scorer.has_pages(each.finished for each in places)
        probes = [each.probes() if room else [] for each in places]
        feeds = [each.scoring_input(probe) for each, found in zip(places, probes, strict=True) for probe in found]
        scores = iter(self._scorer.logprobs(feeds))
        return [
            each.candidates([(probe, next(scores)[0]) for probe in found])
            for each, found in zip(places, probes, strict=True)
        ]

    def _replacements(self, places: CandidateGenerator, proposed: Sequence[HotwordCandidate]) -> list[Replacement]:
        hot, each = places.biasing_list, places.finished
        room = min(self._runner.model.max_tokens, len(each.row.block_table) * 16) - len(each.row.prompt)
        room -= len(each.recognition.tokens)
        wanted = [
            HotwordCandidate(span, word, text, RESPELLING_DISTANCE, 0.0) for span, text, word in places.respellings
        ]
        ways: list[tuple[float, HotwordCandidate, float]] = []
        for way in (*wanted, *proposed):
            if way.phonetic_distance != RESPELLING_DISTANCE and way.text.casefold() in NON_WORD.split(
                way.span.text.casefold()
            ):
                continue  # it is there, beside others
            stem = same_stem(way.text, way.span.text)
            allowed = allowance(
                hot.words[way.word].weight, way.phonetic_distance, same_stem=stem, words=len(hot.words)
            )
            hope = (0.0 if way.span.before else way.score) - self._recognized_logprob(each, way.span) + allowed
            if hope > 0:
                ways.append((hope - RANK_PENALTY * max(0.0, way.phonetic_distance), way, allowed))
        most = max(MAX_REPLACEMENTS, len(places.words))
        found: dict[tuple[int, int, tuple[int, ...]], tuple[float, Replacement]] = {}
        for _, way, allowed in sorted(ways, key=lambda each: -each[0])[: TOKENIZED_FACTOR * most]:
            span = way.span
            look = Replacement(
                span.first, span.end, hot.tokenize(f" {span.before}{way.text}{span.behind}"), allowed
            )
            if len(look.tokens) - (span.end - span.first) < room and (hope := self._upper_bound(each, look)) > 0:
                found.setdefault(look[:3], (hope - RANK_PENALTY * max(0.0, way.phonetic_distance), look))
        return [look for _, look in sorted(found.values(), key=lambda pair: -pair[0])[:most]]

    def _recognized_logprob(self, each: FinishedRow, span: WordSpan | Replacement) -> float:
        """Natural-log probability of what was heard there, with what stands behind."""
        return sum(each.row.hypothesis.logprobs[span.first : span.end + CONTEXT_TOKENS])

    def _tokens_with_eos(self, each: FinishedRow) -> tuple[int, ...]:
        """With end-of-text, where it was said."""
        ended = len(each.row.hypothesis.logprobs) > len(each.recognition.tokens)
        return (*each.recognition.tokens, *[self._runner.model.eos] * ended)

    def _upper_bound(self, each: FinishedRow, look: Replacement) -> float:
        """How much better than it must be it is at most: as likely as its first token that was not said."""
        said = self._tokens_with_eos(each)[look.first :]
        behind = (*look.tokens, *said[look.end - look.first :])
        same = next((i for i, (a, b) in enumerate(zip(behind, said, strict=False)) if a != b), -1)
        if same < 0:
            return 0.0
        new = each.row.top_tokens.get(look.first + same, {}).get(behind[same], LOGPROB_FLOOR)
        before = sum(each.row.hypothesis.logprobs[look.first : look.first + same])
        return before + new - self._recognized_logprob(each, look) + look.allowance

    # --- what the model says ------------------------------------------------------------------------------

    def _score(self, looks: Sequence[tuple[FinishedRow, Replacement]]) -> list[tuple[float, list[float]]]:
        """How much likelier the answer is with it, in natural-log probability; and that of each of its tokens."""
        feeds = []
        for each, look in looks:
            said = (*look.tokens, *self._tokens_with_eos(each)[look.end : look.end + CONTEXT_TOKENS])
            before = each.recognition.tokens[look.first - 1] if look.first else each.row.prompt[-1]
            feeds.append(ScoringInput(each, look.first - 1, (before, *said[:-1]), [(token,) for token in said]))
        found = []
        for (each, look), scores in zip(looks, self._scorer.logprobs(feeds), strict=True):
            new = [score for (score,) in scores]
            found.append((sum(new) - self._recognized_logprob(each, look), new[: len(look.tokens)]))
        return found

    def _apply(self, each: FinishedRow, found: list[ScoredReplacement]) -> FinishedRow:
        taken: list[ScoredReplacement] = []
        for better in sorted(found, key=lambda each: -each.margin):
            first, end = better.replacement.first, better.replacement.end
            if better.margin > 0 and all(end <= o.replacement.first or o.replacement.end <= first for o in taken):
                taken.append(better)
        if not taken:
            return each
        tokens, logprobs = [*each.recognition.tokens], [*each.recognition.logprobs]
        for _, look, new in sorted(taken, key=lambda each: -each.replacement.first):
            tokens[look.first : look.end], logprobs[look.first : look.end] = look.tokens, new
        answer = msgspec.structs.replace(each.recognition, tokens=tuple(tokens), logprobs=tuple(logprobs))
        return each._replace(recognition=answer)
