"""Rescoring with hotwords that were not recognized: an answer is changed where one may stand, and the model
scores the change.

Source  rescoring of alternatives that sound alike, as in spelling correction for speech (arXiv:1902.07178), with
        the recognizer itself as the judge. The numbers were chosen on LibriSpeech's train speech, half of it in
        noise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from asr_serve.decoding.biasing_graph import written_forms
from asr_serve.decoding.token_rules import TokenRule
from asr_serve.engine.seq2seq.biasing_queue import MAX_RECORDED_TOKENS, RescoringList, WrittenForm
from asr_serve.engine.seq2seq.token_aligner import FinishedRow
from asr_serve.kernels import PAGE
from asr_serve.text.tokenizers import token_texts

if TYPE_CHECKING:
    from asr_serve.engine.seq2seq.decode_batch import ForwardInputs
    from asr_serve.engine.seq2seq.decoder import DecodeRunner


MAX_SCORING_POSITIONS = 256
"""Positions of a pass: enough to fill its products, few enough that nobody waits long for it."""


class ScoringInput(NamedTuple):
    """Tokens fed from position `first` of an answer on, -1 being the last of the prompt; `scored_tokens`: tokens
    after each of them whose natural-log probabilities are wanted."""

    finished: FinishedRow
    first: int
    tokens: tuple[int, ...]
    scored_tokens: Sequence[Sequence[int]]

    @property
    def position(self) -> int:
        return len(self.finished.row.prompt) + self.first

    @property
    def pages(self) -> range:
        """Indices in the row's block table of the pages that are written."""
        return range(self.position // PAGE, (self.position + len(self.tokens) - 1) // PAGE + 1)


class AlternativeScorer:
    """Scores alternatives in pages of a runner: first those that rows reserved for longer answers, then free ones
    that not even the cache references. Where they are too few for an input, it overwrites the row's own pages from
    there on."""

    def __init__(self, runner: DecodeRunner) -> None:
        self._runner = runner

    def logprobs(self, feeds: Sequence[ScoringInput]) -> list[list[list[float]]]:
        """Returns the natural-log probabilities of the scored tokens, for each input and each token that it
        feeds."""
        results: list[list[list[float]]] = []
        spare_pages = self._spare_pages({id(feed.finished): feed.finished for feed in feeds}.values())
        for batch in self._batches(feeds, len(spare_pages) + self._unused):
            results += self._score_batch(batch, spare_pages)
        return results

    def has_pages(self, ended: Iterable[FinishedRow]) -> bool:
        """Returns whether there is any page in which to score alternatives of these rows."""
        return bool(self._spare_pages(ended)) or self._unused > 0

    @staticmethod
    def _spare_pages(ended: Iterable[FinishedRow]) -> list[int]:
        """Pages that these rows reserved and their answers did not need, however many other pages are free."""
        return [
            page
            for finished in ended
            for page in finished.row.block_table[
                -(-(len(finished.row.prompt) + len(finished.recognition.tokens)) // PAGE) :
            ]
        ]

    @property
    def _unused(self) -> int:
        return self._runner.page_pool.free_count - self._runner.page_pool.reclaimable_count

    def _batches(self, feeds: Sequence[ScoringInput], most: int) -> Iterator[list[ScoringInput]]:
        """Splits inputs into passes of at most `most` pages."""
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
        """Returns the likeliest tokens at each position of the answer, which is in the row's pages from then
        on."""
        feed = ScoringInput(each, -1, (each.row.prompt[-1], *each.recognition.tokens[:-1]), ())
        top_tokens: list[dict[int, float]] = []
        for first in range(0, len(feed.tokens), MAX_SCORING_POSITIONS):
            part = feed._replace(first=first - 1, tokens=feed.tokens[first : first + MAX_SCORING_POSITIONS])
            logits = self._runner.logits(self._inputs([part]), self._rules([part])).float()
            best = logits.topk(min(count, logits.shape[1]), dim=1)
            scores = best.values - logits.logsumexp(1, keepdim=True)
            rows = zip(best.indices.tolist(), scores.tolist(), strict=True)
            top_tokens += [dict(zip(*row, strict=True)) for row in rows]
        return top_tokens

    def _inputs(self, batch: Sequence[ScoringInput]) -> ForwardInputs:
        return self._runner.batch.rescoring_inputs(
            [feed.finished.row for feed in batch],
            [feed.tokens for feed in batch],
            [feed.position + 1 for feed in batch],
        )

    def _rules(self, batch: Sequence[ScoringInput]) -> list[TokenRule]:
        """Token rules after each position, as when it was decoded."""
        prompts, rules = self._runner.prompts, list[TokenRule]()
        for feed in batch:
            row = feed.finished.row
            tokens = [*feed.finished.recognition.tokens[: max(0, feed.first)], *feed.tokens[feed.first < 0 :]]
            first_end = len(tokens) - len(feed.tokens) + 1
            ends = range(first_end, first_end + len(feed.tokens))
            rules += [prompts.rule(row, tokens[:end]) for end in ends]
        return rules

    def _score_batch(self, batch: Sequence[ScoringInput], left: Sequence[int]) -> list[list[list[float]]]:
        """Scores one pass. `left`: spare pages, which are used before any are allocated."""
        runner, inputs = self._runner, self._inputs(batch)
        needed = sum(len(feed.pages) for feed in batch)
        missing = max(0, needed - len(left))
        fits = missing <= self._unused
        allocated = runner.page_pool.allocate(missing) if fits else []
        try:
            if fits:
                self._assign_pages(batch, inputs.token_tables, [*left[:needed], *allocated])
            logits = runner.logits(inputs, self._rules(batch)).float()
        finally:
            runner.page_pool.free_pages(allocated)
        counts = [len(scored) for feed in batch for scored in feed.scored_tokens]
        positions = torch.arange(len(logits)).repeat_interleave(torch.tensor(counts)).to(logits.device)
        token_list = [token for feed in batch for scored in feed.scored_tokens for token in scored]
        tokens = torch.tensor(token_list, dtype=torch.int64, device=logits.device)
        scores = (logits[positions, tokens] - logits.logsumexp(1)[positions]).tolist()
        results: list[list[list[float]]] = []
        first = 0
        for feed in batch:
            results.append([])
            for scored in feed.scored_tokens:
                results[-1].append(scores[first : first + len(scored)])
                first += len(scored)
        return results

    def _assign_pages(self, batch: Sequence[ScoringInput], own: torch.Tensor, pages: Sequence[int]) -> None:
        """Lets each input write to pages of its own, the first of which is copied from its row."""
        position, used, copies = 0, 0, []
        for feed in batch:
            page_range, end = feed.pages, position + len(feed.tokens)
            assigned = pages[used : used + len(page_range)]
            own[position:end, page_range.start : page_range.stop] = torch.tensor(assigned, dtype=own.dtype)
            copies.append((feed.finished.row.block_table[page_range.start], assigned[0]))
            position, used = end, used + len(page_range)
        self._runner.decoder.copy_pages(copies)


MAX_SPAN_WORDS = 3
"""Words of an answer that may be replaced by one hotword."""
MAX_PHRASE_WORDS = 6
"""Greatest span, in words, for lists with phrases of more than MAX_SPAN_WORDS."""
MAX_PHONETIC_MATCHES = 6
"""Hotwords that are nearest in sound to a span of an answer, of which candidates are made."""
MAX_PHONETIC_DISTANCE = 0.5
"""Greatest distance, in changes per sound, of hotwords that only their sounds support."""
MAX_LIKELY_DISTANCE = 0.7
"""Greatest distance of hotwords that the model finds possible."""
MIN_FIRST_TOKEN_LOGPROB = -6.5
"""Natural-log probability of a first token above which it may begin a hotword."""
PROBES_PER_WORD = 4
"""First tokens besides the recognized one that are tried in place of a word, on average."""
MAX_CANDIDATES_PER_WORD = 32
"""Hotwords that the model finds possible in place of a word, on average; of more, the likeliest. Of ten thousand
words Whisper and Moonshine found up to 6 possible on LJSpeech, some of it in noise. Where thousands begin with the
same two tokens, as part numbers do, comparing the sounds of all took seconds of the loop."""
RESPELLING_DISTANCE = float("-inf")
"""Distance of a hotword that was recognized, but is written otherwise."""
LOGPROB_FLOOR = -12.0
"""Bound of the natural-log probability of tokens that are not among the likeliest at a position."""
WORD_EDGES = re.compile(r"^(\W*)(.*?)((?:['\u2019]s)?\W*)$", re.DOTALL)
"""Punctuation before a word, the word, and its possessive and punctuation."""


class RecognizedWord(NamedTuple):
    """Word of an answer: the range of its tokens, and its text."""

    first: int
    end: int
    text: str


class WordSpan(NamedTuple):
    """Consecutive words of an answer: the range of their tokens, their text, and what is written around it."""

    first: int
    end: int
    before: str
    text: str
    behind: str


class HotwordCandidate(NamedTuple):
    """Hotword in place of a span. `phonetic_distance`: see PhoneticIndex.nearest; `score`: bound of its
    natural-log probability."""

    span: WordSpan
    word: int
    text: str
    phonetic_distance: float
    score: float


class FirstTokenProbe(NamedTuple):
    """First token that was not recognized, in place of the word that begins there."""

    at: int
    token: int
    logprob: float


class CandidateGenerator:
    """Candidates of one answer with hotwords: where one may stand."""

    def __init__(self, each: FinishedRow, words: Sequence[RecognizedWord]) -> None:
        biasing_list, fixed = each.row.hotwords, each.row.hypothesis.fixed
        assert isinstance(biasing_list, RescoringList)
        self.finished, self.biasing_list, self.words = each, biasing_list, words
        self.respellings: list[tuple[WordSpan, str, int]] = []
        """Hotwords that were recognized, but are written otherwise."""
        self.spans: list[list[WordSpan]] = [[] for _ in words]
        """Spans by the index of their first word."""
        is_hotword = [
            (match[2].casefold() if (match := WORD_EDGES.match(word.text)) else "") in biasing_list.known
            for word in words
        ]
        max_words = min(max(MAX_SPAN_WORDS, biasing_list.longest), MAX_PHRASE_WORDS)
        for i in range(len(words)):
            for j in range(i + 1, min(i + max_words, len(words)) + 1):
                if not words[j - 1].text:
                    break
                match = WORD_EDGES.match(" ".join(word.text for word in words[i:j]))
                if match is None or words[i].first < fixed:
                    continue
                span = WordSpan(words[i].first, words[j - 1].end, *match.groups())
                if (hotword := biasing_list.known.get(span.text.casefold())) is not None:
                    if len(written_forms(hotword.text)) == 1 and hotword.text != span.text:
                        self.respellings.append((span, hotword.text, biasing_list.words.index(hotword)))
                elif not any(is_hotword[i:j]):
                    self.spans[i].append(span)

    def probes(self) -> list[FirstTokenProbe]:
        """First tokens to try in the whole answer, likeliest first."""
        tokens, likeliest = self.finished.recognition.tokens, self.finished.row.top_tokens
        probes = [
            FirstTokenProbe(i, token, logprob)
            for i, spans in enumerate(self.spans)
            if spans
            for token, logprob in likeliest.get(self.words[i].first, {}).items()
            if logprob > MIN_FIRST_TOKEN_LOGPROB
            and token in self.biasing_list.forms_by_first_token
            and token != tokens[self.words[i].first]
        ]
        probes.sort(key=lambda probe: -probe.logprob)
        return probes[: PROBES_PER_WORD * len(self.words)]

    def scoring_input(self, probe: FirstTokenProbe) -> ScoringInput:
        return ScoringInput(self.finished, self.words[probe.at].first, (probe.token,), (self._second_tokens(probe),))

    def _second_tokens(self, probe: FirstTokenProbe) -> list[int]:
        return [form.tokens[1] for form in self.biasing_list.forms_by_first_token[probe.token] if len(form.tokens) > 1]

    def candidates(self, probes: Sequence[tuple[FirstTokenProbe, Sequence[float]]]) -> list[HotwordCandidate]:
        """Returns hotwords that the model finds possible, each in the span that fits its sounds best and in the
        shortest one, and those that sound alike. `probes`: each with the natural-log probabilities of its second
        tokens."""
        possible: list[tuple[int, WrittenForm, float]] = []
        for probe, seconds in probes:
            scores = iter(seconds)
            for form in self.biasing_list.forms_by_first_token[probe.token]:
                score = probe.logprob + (next(scores) if len(form.tokens) > 1 else 0.0)
                possible.append((probe.at, form, score))
        for i, spans in enumerate(self.spans):
            first = self.words[i].first
            for form in (
                self.biasing_list.forms_by_first_token.get(self.finished.recognition.tokens[first], ()) if spans else ()
            ):
                possible.append((i, form, self._score(first, form.tokens)))
        possible = [candidate for candidate in possible if candidate[2] > LOGPROB_FLOOR]
        if len(possible) > (max_candidates := MAX_CANDIDATES_PER_WORD * len(self.words)):
            possible = sorted(possible, key=lambda candidate: -candidate[2])[:max_candidates]
        return self._likely_candidates(possible) + self._phonetic_candidates()

    def _score(self, first: int, tokens: Sequence[int]) -> float:
        """Bound of the natural-log probability of a form that begins with these tokens at `first`."""
        likeliest = self.finished.row.top_tokens
        score = likeliest.get(first, {}).get(tokens[0], LOGPROB_FLOOR)
        if len(tokens) > 1 and tokens[0] == self.finished.recognition.tokens[first]:
            score += likeliest.get(first + 1, {}).get(tokens[1], LOGPROB_FLOOR)
        return score

    def _likely_candidates(self, possible: Sequence[tuple[int, WrittenForm, float]]) -> list[HotwordCandidate]:
        spans = [span for spans in self.spans for span in spans]
        span_index = {span: i for i, span in enumerate(spans)}
        pairs = sorted({(span_index[span], form.word) for i, form, _ in possible for span in self.spans[i]})
        distances = dict(
            zip(pairs, self.biasing_list.phonetic_index.distances([span.text for span in spans], pairs), strict=True)
        )
        candidates = []
        for i, form, score in possible:
            nearest = min(self.spans[i], key=lambda span: distances[span_index[span], form.word])
            for span in dict.fromkeys((nearest, self.spans[i][0])):
                if (distance := distances[span_index[span], form.word]) <= MAX_LIKELY_DISTANCE:
                    candidates.append(HotwordCandidate(span, form.word, form.text, distance, score))
        return candidates

    def _phonetic_candidates(self) -> list[HotwordCandidate]:
        spans = [span for spans in self.spans for span in spans]
        nearest = self.biasing_list.phonetic_index.nearest(
            [span.text for span in spans], MAX_PHONETIC_MATCHES, MAX_PHONETIC_DISTANCE
        )
        return [
            HotwordCandidate(
                span, word, form, distance, self._score(span.first, self.biasing_list.tokens_by_form[form])
            )
            for span, words in zip(spans, nearest, strict=True)
            for word, distance in words
            for form in self._forms(self.biasing_list.words[word].text, span.text)
        ]

    def _forms(self, word: str, recognized: str) -> list[str]:
        """Written forms of a word: none has a capital where the recognized text has none, except the form in the
        client's list."""
        return [form for form in written_forms(word) if form == word or form[:1].isupper() <= recognized[:1].isupper()]


MAX_REPLACEMENTS = 24
"""Replacements scored for an answer of up to so many words; a longer one has as many as it has words."""
TOKENIZED_FACTOR = 3
"""Ratio of candidates that are tokenized to replacements that are scored."""
CONTEXT_TOKENS = 4
"""Tokens after a replacement that tell whether it fits."""
BASE_ALLOWANCE, DISTANCE_PENALTY = 7.2, 4.0
"""Natural-log probability by which a hotword of weight 1 may be less likely than what was recognized; and its
reduction where all of the word's sounds differ."""
SAME_STEM_PENALTY = 1.0
"""Reduction for a recognized word with another ending: models tell such words apart."""
LIST_SIZE_PENALTY, LIST_SIZE_SCALE = 1.0, 1_000
"""Reduction by the size of the list: 0.7 for a thousand words, 2.4 for ten thousand."""
WEIGHT_GAIN = 2.0
"""Increase for a weight e times as great: ten times is 4.6 more, and no weight overcomes all differences in
sound."""
RANK_PENALTY = 4.0
"""Reduction in rank, among candidates to be scored, where all sounds of a word differ."""
NON_WORD = re.compile(r"[\W_]+")


class Replacement(NamedTuple):
    """Replacement of the tokens of an answer from `first` to `end`. `allowance`: natural-log probability by which
    it may be less likely than what was recognized."""

    first: int
    end: int
    tokens: tuple[int, ...]
    allowance: float


def allowance(weight: float, far: float, *, same_stem: bool = False, words: int = 1) -> float:
    """Natural-log probability by which a hotword may be less likely than what was recognized. `far`: see
    PhoneticIndex.nearest; `words`: size of its list."""
    if far == RESPELLING_DISTANCE:
        return math.inf
    base = BASE_ALLOWANCE + WEIGHT_GAIN * math.log(weight) - LIST_SIZE_PENALTY * math.log1p(words / LIST_SIZE_SCALE)
    return base - DISTANCE_PENALTY * far - SAME_STEM_PENALTY * same_stem


def same_stem(one: str, other: str) -> bool:
    """Returns whether two words differ only in their endings: in up to three letters after three or more."""
    one, other = one.casefold(), other.casefold()
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    return max(len(one), len(other)) - common <= 3 and common >= 3


class ScoredReplacement(NamedTuple):
    """Margin over what is required of a replacement, and the natural-log probabilities of its tokens."""

    margin: float
    replacement: Replacement
    logprobs: list[float]


class HotwordRescorer:
    """Rescores rows that have ended, in pages of a runner; may overwrite the rows' own pages."""

    def __init__(self, runner: DecodeRunner, text: Callable[[list[int]], str]) -> None:
        self._runner, self._text, self._scorer = runner, text, AlternativeScorer(runner)

    @torch.inference_mode()
    def rescore(self, ended: Sequence[FinishedRow]) -> list[FinishedRow]:
        """Returns the rows, with the hotwords that the model finds about as likely as what was recognized."""
        results = list(ended)
        indices = [i for i, each in enumerate(ended) if self.applies(each)]
        if not indices:
            return results
        for each in (ended[i] for i in indices):
            if each.row.hypothesis.beam > 1:  # the row's own pages hold only the beginning of what beams generated
                each.row.top_tokens = dict(enumerate(self._scorer.top_tokens(each, MAX_RECORDED_TOKENS)))
        generators = [CandidateGenerator(ended[i], self._words(ended[i].recognition.tokens)) for i in indices]
        replacements = [
            self._replacements(*pair) for pair in zip(generators, self._candidates(generators), strict=True)
        ]
        batch = [(index, edit) for index, proposed in enumerate(replacements) for edit in proposed]
        # Back to front: where a row's own pages are overwritten, what comes before a span is still in them.
        batch.sort(key=lambda pair: -pair[1].first)
        scored: list[list[ScoredReplacement]] = [[] for _ in indices]
        scores = self._score([(generators[index].finished, edit) for index, edit in batch])
        for (index, edit), (gain, logprobs) in zip(batch, scores, strict=True):
            if gain > -math.inf:  # no allowance makes up for a token that is ruled out
                scored[index].append(ScoredReplacement(gain + edit.allowance, edit, logprobs))
        for i, candidates in zip(indices, scored, strict=True):
            results[i] = self._apply(ended[i], candidates)
        return results

    def applies(self, each: FinishedRow) -> bool:
        """Returns whether it has hotwords, and its pages hold just this answer."""
        hypothesis, tokens = each.row.hypothesis, each.recognition.tokens
        return isinstance(hypothesis.hotwords, RescoringList) and bool(tokens) and tokens == tuple(hypothesis.tokens)

    # --- candidates ---------------------------------------------------------------------------------------

    def _words(self, tokens: Sequence[int]) -> list[RecognizedWord]:
        special = self._runner.prompts.special
        words: list[RecognizedWord] = []
        texts = token_texts(list(tokens), self._text)
        for at, (token, text) in enumerate(zip(tokens, texts, strict=True)):
            if special is not None and token >= special.eot:
                words.append(RecognizedWord(at, at, ""))
            elif not words or text[:1].isspace() or words[-1].first == words[-1].end:
                words.append(RecognizedWord(at, at + 1, text.strip()))
            else:
                words[-1] = RecognizedWord(words[-1].first, at + 1, words[-1].text + text)
        return words

    def _candidates(self, generators: Sequence[CandidateGenerator]) -> list[list[HotwordCandidate]]:
        """Probes first tokens in pages of their own, if there are any: the rows' pages are needed later."""
        room = self._scorer.has_pages(generator.finished for generator in generators)
        probes = [generator.probes() if room else [] for generator in generators]
        inputs = [
            generator.scoring_input(probe)
            for generator, found in zip(generators, probes, strict=True)
            for probe in found
        ]
        scores = iter(self._scorer.logprobs(inputs))
        return [
            generator.candidates([(probe, next(scores)[0]) for probe in found])
            for generator, found in zip(generators, probes, strict=True)
        ]

    def _replacements(self, generator: CandidateGenerator, proposed: Sequence[HotwordCandidate]) -> list[Replacement]:
        hotwords, each = generator.biasing_list, generator.finished
        room = min(self._runner.model.max_tokens, len(each.row.block_table) * PAGE) - len(each.row.prompt)
        room -= len(each.recognition.tokens)
        respellings = [
            HotwordCandidate(span, word, text, RESPELLING_DISTANCE, 0.0) for span, text, word in generator.respellings
        ]
        ranking: list[tuple[float, HotwordCandidate, float]] = []
        for candidate in (*respellings, *proposed):
            if candidate.phonetic_distance != RESPELLING_DISTANCE and candidate.text.casefold() in NON_WORD.split(
                candidate.span.text.casefold()
            ):
                continue  # it is there, beside others
            stem = same_stem(candidate.text, candidate.span.text)
            allowed = allowance(
                hotwords.words[candidate.word].weight,
                candidate.phonetic_distance,
                same_stem=stem,
                words=len(hotwords.words),
            )
            margin = (
                (0.0 if candidate.span.before else candidate.score)
                - self._recognized_logprob(each, candidate.span)
                + allowed
            )
            if margin > 0:
                ranking.append((margin - RANK_PENALTY * max(0.0, candidate.phonetic_distance), candidate, allowed))
        limit = max(MAX_REPLACEMENTS, len(generator.words))
        replacements: dict[tuple[int, int, tuple[int, ...]], tuple[float, Replacement]] = {}
        for _, candidate, allowed in sorted(ranking, key=lambda ranked: -ranked[0])[: TOKENIZED_FACTOR * limit]:
            span = candidate.span
            edit = Replacement(
                span.first, span.end, hotwords.tokenize(f" {span.before}{candidate.text}{span.behind}"), allowed
            )
            if len(edit.tokens) - (span.end - span.first) < room and (margin := self._upper_bound(each, edit)) > 0:
                replacements.setdefault(edit[:3], (margin - RANK_PENALTY * max(0.0, candidate.phonetic_distance), edit))
        return [edit for _, edit in sorted(replacements.values(), key=lambda pair: -pair[0])[:limit]]

    def _recognized_logprob(self, each: FinishedRow, span: WordSpan | Replacement) -> float:
        """Natural-log probability of the recognized tokens there, and of CONTEXT_TOKENS after them."""
        return sum(each.row.hypothesis.logprobs[span.first : span.end + CONTEXT_TOKENS])

    def _tokens_with_eos(self, each: FinishedRow) -> tuple[int, ...]:
        """Tokens of the answer, with end-of-text if it was recognized."""
        ended = len(each.row.hypothesis.logprobs) > len(each.recognition.tokens)
        return (*each.recognition.tokens, *[each.row.hypothesis.end_token] * ended)

    def _upper_bound(self, each: FinishedRow, replacement: Replacement) -> float:
        """Bound of a replacement's margin, from the probability of its first token that differs from the
        answer."""
        tokens = self._tokens_with_eos(each)[replacement.first :]
        changed = (*replacement.tokens, *tokens[replacement.end - replacement.first :])
        difference = next((i for i, (a, b) in enumerate(zip(changed, tokens, strict=False)) if a != b), -1)
        if difference < 0:
            return 0.0
        new_logprob = each.row.top_tokens.get(replacement.first + difference, {}).get(
            changed[difference], LOGPROB_FLOOR
        )
        common_logprob = sum(each.row.hypothesis.logprobs[replacement.first : replacement.first + difference])
        return common_logprob + new_logprob - self._recognized_logprob(each, replacement) + replacement.allowance

    # --- scoring ------------------------------------------------------------------------------------------

    def _score(self, replacements: Sequence[tuple[FinishedRow, Replacement]]) -> list[tuple[float, list[float]]]:
        """Returns by how much each replacement makes the answer likelier, in natural-log probability, and the
        natural-log probabilities of its tokens."""
        inputs = []
        for each, edit in replacements:
            tokens = (*edit.tokens, *self._tokens_with_eos(each)[edit.end : edit.end + CONTEXT_TOKENS])
            previous = each.recognition.tokens[edit.first - 1] if edit.first else each.row.prompt[-1]
            inputs.append(ScoringInput(each, edit.first - 1, (previous, *tokens[:-1]), [(token,) for token in tokens]))
        results = []
        for (each, edit), scores in zip(replacements, self._scorer.logprobs(inputs), strict=True):
            logprobs = [score for (score,) in scores]
            results.append((sum(logprobs) - self._recognized_logprob(each, edit), logprobs[: len(edit.tokens)]))
        return results

    def _apply(self, each: FinishedRow, found: list[ScoredReplacement]) -> FinishedRow:
        taken: list[ScoredReplacement] = []
        for candidate in sorted(found, key=lambda scored: -scored.margin):
            first, end = candidate.replacement.first, candidate.replacement.end
            if candidate.margin > 0 and all(
                end <= other.replacement.first or other.replacement.end <= first for other in taken
            ):
                taken.append(candidate)
        if not taken:
            return each
        tokens, logprobs = [*each.recognition.tokens], [*each.recognition.logprobs]
        for _, edit, new in sorted(taken, key=lambda scored: -scored.replacement.first):
            tokens[edit.first : edit.end], logprobs[edit.first : edit.end] = edit.tokens, new
        answer = msgspec.structs.replace(each.recognition, tokens=tuple(tokens), logprobs=tuple(logprobs))
        return each._replace(recognition=answer)
