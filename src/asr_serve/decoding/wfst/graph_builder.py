"""Decoding graphs for CTC models, of their tokens (T), a lexicon (L) and a word n-gram model (G).

L and G are composed, determinized and minimized by kaldifst; T is composed with the result here.

Source: Mohri, Pereira and Riley 2002, Weighted finite-state transducers in speech recognition; for CTC: Miao, Gowayyed
and Metze 2015, EESEN, arXiv:1507.08240.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from asr_serve.decoding.wfst.lexicon import CtcTokens, DecodingLexicon
from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.models.checkpoints.openfst_files import (
    EPSILON,
    FstFile,
    make_transducer,
    read_transducer,
    write_transducer,
)
from asr_serve.models.decoding_graph import WORD_BOUNDARIES, DecodingGraph
from asr_serve.models.ngram import NgramModel

NONWORD, BEGIN, END, INTERNAL, SINGLETON = range(len(WORD_BOUNDARIES))
MAX_ARCS = (1 << 31) - 1
COST_STEP = 2.0**-14
"""Costs of arcs are rounded to multiples of it, so that states that differ in rounding errors alone are one."""


class GraphStep(NamedTuple):
    """Size of a transducer on the way to the graph, and how long it took to make."""

    name: str
    states: int
    arcs: int
    duration_s: float


class _KaldifstTransducer(Protocol):
    num_states: int

    def num_arcs(self, state: int) -> int: ...


class TokenLabels(NamedTuple):
    """Input labels of a graph: a label for each token and each place of a word in which it may be, so that words have
    times and no word is a prefix of another; then the labels of disambiguation symbols."""

    tokens: int

    def label(self, token: int, boundary: int) -> int:
        return 1 + boundary * self.tokens + token

    @property
    def first_symbol(self) -> int:
        return 1 + len(WORD_BOUNDARIES) * self.tokens

    def columns(self) -> np.ndarray:
        """(labels,) int32: token of each label; that of label 0, epsilon, is not read."""
        return ((np.arange(self.first_symbol) - 1) % self.tokens).astype(np.int32)

    def boundaries(self) -> np.ndarray:
        """(labels,) int8: index into WORD_BOUNDARIES of each label."""
        return ((np.arange(self.first_symbol) - 1).clip(min=0) // self.tokens).astype(np.int8)


def build_decoding_graph(
    tokens: CtcTokens,
    lexicon: DecodingLexicon,
    language_model: NgramModel,
    *,
    on_the_fly: bool = False,
    report: Callable[[GraphStep], None] = lambda _: None,
) -> DecodingGraph:
    """Decoding graph whose paths are the CTC alignments of sentences of the lexicon's words.

    The cost of a path is that of its sentence in the language model. As in every graph with back-off arcs, a word whose
    n-gram is less probable than its back-off has the back-off's probability. Sentences may be empty; a token between
    words may be repeated, and stand before and after all.

    Args:
        language_model: n-gram model whose words are indices into the lexicon's.
        on_the_fly: leave the language model out of the graph, for the search to compose: exact, and of the size of the
            lexicon, but slower to search.
        report: called after each step.

    Raises: OptionError for a language model that allows no sentence of the lexicon, or a graph that is too large;
    UnsupportedOption without kaldifst.
    """
    kaldifst = import_kaldifst()
    if not np.isfinite(language_model.arc_logprobs).any() or not np.isfinite(language_model.final_logprobs).any():
        raise OptionError(
            "no sentence of the lexicon's words is possible in the language model",
            "words that both have, and an end of sentences",
        )
    labels = TokenLabels(len(tokens.names))
    clock = time.perf_counter()

    def done(name: str, states: int, arcs: int) -> None:
        nonlocal clock
        report(GraphStep(name, states, arcs, time.perf_counter() - clock))
        clock = time.perf_counter()

    def done_in_kaldifst(name: str, fst: _KaldifstTransducer) -> None:
        done(name, fst.num_states, sum(map(fst.num_arcs, range(fst.num_states))))

    with tempfile.TemporaryDirectory(prefix="asr-serve-graph-") as folder:
        exchange = Path(folder) / "exchange.fst"

        def to_kaldifst(transducer: FstFile) -> Any:
            write_transducer(transducer, exchange)
            return kaldifst.StdVectorFst.read(str(exchange))

        made = lexicon_transducer(tokens, labels, lexicon, backoffs=not on_the_fly)
        done("L", len(made.final_costs), len(made.arcs))
        fst = to_kaldifst(made)
        if not on_the_fly:
            made = grammar_acceptor(language_model, len(lexicon.words))
            done("G", len(made.final_costs), len(made.arcs))
            grammar = to_kaldifst(made)
            kaldifst.arcsort(fst, "olabel")
            kaldifst.arcsort(grammar, "ilabel")
            fst = kaldifst.compose(fst, grammar)
            del grammar
            done_in_kaldifst("L o G", fst)
        kaldifst.determinize_star(fst, COST_STEP)
        done_in_kaldifst("det", fst)
        kaldifst.minimize_encoded(fst, COST_STEP)
        kaldifst.connect(fst)
        done_in_kaldifst("min", fst)
        kaldifst.StdConstFst(fst).write(str(exchange))
        del fst
        composed = read_transducer(exchange)
    graph = compose_ctc_topology(composed, labels, tokens.blank)
    done("T o", graph.states, len(graph.arc_costs))
    return graph._replace(language_model=language_model) if on_the_fly else graph


def lexicon_transducer(tokens: CtcTokens, labels: TokenLabels, lexicon: DecodingLexicon, *, backoffs: bool) -> FstFile:
    """L: from labels to words plus 1, with disambiguation symbols: with `backoffs` #0, which the language model's
    back-offs read, before words; #1, #2, ... behind spellings that several words have, in the order of the lexicon."""
    start, word_start = 0, 1
    word_end = start if tokens.separator is None else 2
    states = 2 if tokens.separator is None else 3
    arcs: list[tuple[int, int, int, int]] = [
        # A back-off is followed by a word, so that an end has but one path.
        (start, EPSILON, EPSILON, word_start)
    ]
    if backoffs:
        arcs.append((word_start, labels.first_symbol, len(lexicon.words) + 1, word_start))
    if tokens.separator is not None:
        separator = labels.label(tokens.separator, NONWORD)
        arcs += [(start, separator, EPSILON, start), (word_end, separator, EPSILON, start)]
    shared = Counter(spelling for _, spelling in lexicon.spellings)
    homophones: Counter[tuple[int, ...]] = Counter()
    for word, spelling in lexicon.spellings:
        state, output = word_start, word + 1
        last = len(spelling) - 1
        symbol = EPSILON
        if shared[spelling] > 1:
            symbol = labels.first_symbol + 1 + homophones[spelling]
            homophones[spelling] += 1
        for position, token in enumerate(spelling):
            boundary = (
                (SINGLETON if position == last else BEGIN) if position == 0 else (END if position == last else INTERNAL)
            )
            target = word_end if position == last and symbol == EPSILON else states
            states += target == states
            arcs.append((state, labels.label(token, boundary), output, target))
            state, output = target, EPSILON
        if symbol != EPSILON:
            arcs.append((state, symbol, EPSILON, word_end))
    finals = np.full(states, np.inf, np.float32)
    finals[[start, word_end]] = 0.0
    sources, inputs, outputs, targets = np.array(arcs, np.int64).T
    return make_transducer(start, finals, sources, inputs, outputs, 0.0, targets)


def grammar_acceptor(model: NgramModel, words: int) -> FstFile:
    """G: from words plus 1 to words plus 1; back-offs read the symbol #0, words + 1."""
    usable = np.isfinite(model.arc_logprobs)
    sources = np.repeat(np.arange(model.states), np.diff(model.arc_offsets))[usable]
    contexts = np.flatnonzero((model.backoff_states >= 0) & np.isfinite(model.backoff_logprobs))
    labels = model.arc_words[usable] + 1
    return make_transducer(
        model.start_state,
        -model.final_logprobs,
        np.concatenate([sources, contexts]),
        np.concatenate([labels, np.full(len(contexts), words + 1)]),
        np.concatenate([labels, np.zeros(len(contexts), np.int64)]),
        np.concatenate([-model.arc_logprobs[usable], -model.backoff_logprobs[contexts]]),
        np.concatenate([model.arc_states[usable], model.backoff_states[contexts]]),
    )


def cheaper_backoffs(model: NgramModel) -> int:
    """Number of n-grams that are less probable than their back-off."""
    sources = np.repeat(np.arange(model.states), np.diff(model.arc_offsets))
    width = int(model.arc_words.max(initial=0)) + 1
    keys = sources * width + model.arc_words  # rising
    backoffs, best = np.zeros(len(keys)), np.full(len(keys), -np.inf)
    states = sources
    while len(keys) and (states > 0).any():
        backoffs = backoffs + np.where(states > 0, model.backoff_logprobs[states], 0.0)
        states = np.where(states > 0, model.backoff_states[states], -1)
        wanted = states * width + model.arc_words
        places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
        hit = (states >= 0) & (keys[places] == wanted)
        best = np.where(hit, np.maximum(best, backoffs + model.arc_logprobs[places]), best)
    return int((best > model.arc_logprobs + COST_STEP).sum())


# --- the CTC topology -------------------------------------------------------------------------------------


def compose_ctc_topology(transducer: FstFile, labels: TokenLabels, blank: int) -> DecodingGraph:
    """Composition of T, the CTC topology, with a transducer from labels to words plus 1.

    T lets blanks stand anywhere, lets a token last several frames, and asks a blank between two equal tokens. Its arcs
    are quadratic in the tokens, so it is composed without being written down. The states of the result, for a state s
    of the transducer:
        blank       s, after a blank. Epsilon arcs are not followed from here: they were before the blank.
        token       s, after the token u that led to it, which may last.
        passed      s, reached by an epsilon arc after the token u, which may not last any more, or at the start. States
                    that differ in a u which nothing after them begins with are one.
    So each alignment of a path of the transducer is one path.
    """
    states, columns = len(transducer.final_costs), labels.columns()
    tokens, none = labels.tokens, labels.tokens
    width = tokens + 1
    sources = np.repeat(np.arange(states), np.diff(transducer.offsets))
    arcs = transducer.arcs
    consumes = (arcs["input"] != EPSILON) & (arcs["input"] < labels.first_symbol)
    consuming = _ArcTable(states, sources[consumes], arcs[consumes])
    epsilon = _ArcTable(states, sources[~consumes], arcs[~consumes])
    begins = np.unique(consuming.sources * width + columns[consuming.arcs["input"]])
    """Pairs of a state and a token that one of its arcs consumes, as numbers."""

    token_keys = np.unique(consuming.targets * labels.first_symbol + consuming.arcs["input"])
    token_states, token_labels = np.divmod(token_keys, labels.first_symbol)
    start_key = transducer.start_state * width + none
    reached = _reach(epsilon, token_states * width + columns[token_labels], start_key, width)
    # Each also as what stands for it where the token before it does not matter.
    passed = np.union1d(reached, reached // width * width + none)
    blocked = _blocked(epsilon, passed, begins, width)

    def passed_keys(keys: np.ndarray) -> np.ndarray:
        """The state that stands for each passed state."""
        return np.where(blocked[np.searchsorted(passed, keys)], keys, keys // width * width + none)

    passed_kept = np.unique(passed_keys(reached))
    passed_states, passed_tokens = np.divmod(passed_kept, width)
    useful = np.isfinite(transducer.final_costs)
    useful[consuming.sources] = True
    has_blank = np.zeros(states, bool)
    has_blank[token_states] = has_blank[passed_states] = True
    has_blank &= useful
    blank_states = np.flatnonzero(has_blank)
    first_token, first_passed = len(blank_states), len(blank_states) + len(token_keys)
    total = first_passed + len(passed_kept)
    blank_of = np.full(states, -1, np.int64)
    blank_of[blank_states] = np.arange(len(blank_states))

    builder = _GraphArcs()
    blank_label = labels.label(blank, NONWORD)
    # Who stands where: the state of the transducer, and the token that may not be consumed next, of each new state.
    places = np.concatenate([blank_states, token_states, passed_states])
    last = np.concatenate([np.full(len(blank_states), none), columns[token_labels], passed_tokens])
    builder.add(np.arange(first_token, first_passed), token_labels, -1, 0.0, np.arange(first_token, first_passed))
    to_blank = np.flatnonzero(has_blank[places])
    builder.add(to_blank, blank_label, -1, 0.0, blank_of[places[to_blank]])
    new, arc = consuming.of(places)
    allowed = columns[consuming.arcs["input"][arc]] != last[new]
    new, arc = new[allowed], arc[allowed]
    inputs = consuming.arcs["input"][arc]
    targets = first_token + np.searchsorted(token_keys, consuming.targets[arc] * labels.first_symbol + inputs)
    builder.add(new, inputs, consuming.arcs["output"][arc] - 1, consuming.arcs["cost"][arc], targets)
    new, arc = epsilon.of(places[first_token:])
    new += first_token
    keys = passed_keys(epsilon.targets[arc] * width + last[new])
    targets = first_passed + np.searchsorted(passed_kept, keys)
    builder.add(new, -1, epsilon.arcs["output"][arc] - 1, epsilon.arcs["cost"][arc], targets)
    start = first_passed + int(np.searchsorted(passed_kept, start_key))
    return builder.graph(labels, transducer.final_costs[places], start, total)


class _ArcTable:
    """Arcs of a kind, by the state that they leave."""

    def __init__(self, states: int, sources: np.ndarray, arcs: np.ndarray) -> None:
        """`sources`: rising."""
        self.sources, self.arcs, self.targets = sources, arcs, arcs["state"].astype(np.int64)
        self._offsets = np.zeros(states + 1, np.int64)
        np.cumsum(np.bincount(sources, minlength=states), out=self._offsets[1:])

    def of(self, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Arcs that leave each of some states: indices into `states`, and into the arcs."""
        counts = self._offsets[states + 1] - self._offsets[states]
        rows = np.repeat(np.arange(len(states)), counts)
        first = np.cumsum(counts) - counts
        return rows, np.arange(len(rows)) - first[rows] + self._offsets[states][rows]


def _reach(epsilon: _ArcTable, keys: np.ndarray, start: int, width: int) -> np.ndarray:
    """Pairs of a state and the token before it, as numbers, that epsilon arcs lead to from `keys`; and the start."""
    found = np.array([start])
    new = np.unique(np.append(keys, start))
    while len(new):
        rows, arcs = epsilon.of(new // width)
        new = np.setdiff1d(epsilon.targets[arcs] * width + new[rows] % width, found)
        found = np.union1d(found, new)
    return found


def _blocked(epsilon: _ArcTable, keys: np.ndarray, begins: np.ndarray, width: int) -> np.ndarray:
    """Returns whether the token before each of `keys` is one with which its state can go on, at once or after epsilon
    arcs."""
    blocked = np.isin(keys, begins)
    rows, arcs = epsilon.of(keys // width)
    targets = np.searchsorted(keys, epsilon.targets[arcs] * width + keys[rows] % width)
    while True:
        before = blocked.copy()
        np.logical_or.at(blocked, rows, before[targets])
        if np.array_equal(before, blocked):
            return blocked


class _GraphArcs:
    """Arcs of a graph, collected in any order."""

    def __init__(self) -> None:
        self._columns: list[tuple[np.ndarray, ...]] = []

    def add(
        self,
        sources: np.ndarray,
        labels: np.ndarray | int,
        words: np.ndarray | int,
        costs: np.ndarray | float,
        targets: np.ndarray,
    ) -> None:
        """`labels`, `words`: -1 for none."""
        values: Iterable[tuple[Any, type]] = (
            (sources, np.int64), (labels, np.int32), (words, np.int32), (costs, np.float32), (targets, np.int32),
        )  # fmt: skip
        self._columns.append(tuple(np.broadcast_to(np.asarray(v, t), len(sources)) for v, t in values))

    def graph(self, labels: TokenLabels, final_costs: np.ndarray, start_state: int, states: int) -> DecodingGraph:
        sources, inputs, words, costs, targets = (np.concatenate(each) for each in zip(*self._columns, strict=True))
        if len(sources) > MAX_ARCS:
            raise OptionError(f"a graph of {len(sources):,} arcs", f"up to {MAX_ARCS:,}", "prune the language model")
        order = np.lexsort((inputs < 0, sources))
        offsets = np.zeros(states + 1, np.int32)
        np.cumsum(np.bincount(sources, minlength=states), out=offsets[1:])
        consuming = np.bincount(sources[inputs >= 0], minlength=states)
        graph = DecodingGraph(
            arc_offsets=offsets,
            epsilon_offsets=(offsets[:-1] + consuming).astype(np.int32),
            arc_labels=inputs[order],
            arc_words=words[order],
            arc_costs=costs[order],
            arc_states=targets[order],
            final_costs=np.ascontiguousarray(final_costs, np.float32),
            label_columns=labels.columns().clip(min=0),
            label_phones=np.arange(labels.first_symbol, dtype=np.int32),
            phone_boundaries=labels.boundaries(),
            start_state=start_state,
        )
        graph.validate()
        return graph


def import_kaldifst() -> Any:
    """The module kaldifst. Raises UnsupportedOption where it is not installed."""
    try:
        import kaldifst
    except ImportError as failure:
        raise UnsupportedOption(
            f"kaldifst cannot be imported: {failure}",
            "graphs are composed and determinized by it",
            "pip install 'asr-serve[build]'",
        ) from failure
    return kaldifst
