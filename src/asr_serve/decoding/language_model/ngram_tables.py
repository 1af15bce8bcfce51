"""N-grams as tables, one for each order: the form in which they are read, trained and written, and from which the
arrays of a search are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.ngram import NgramModel

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
BEGIN_ID, END_ID, FIRST_WORD_ID = 0, 1, 2
"""Ids in tables: the start and the end of a sentence, then the words."""
LEAST_LOGPROB = -23.0
"""Least natural-log probability in a search, that of one in ten thousand million: a recogniser may have heard nothing
else than what a model holds to be impossible."""
NGRAM_SUFFIX = ".ngram.safetensors"
SPACE_MARKS = ("\u2581", "\u0120")
"""Symbols for a space at the start of a recogniser's tokens: SentencePiece's, and that of byte-level BPE."""


class NgramTable(NamedTuple):
    """All n-grams of one order, in any order of rows, each once."""

    words: np.ndarray
    """(rows, order) int32, ids."""
    logprobs: np.ndarray
    """(rows,) float64: natural-log probability of the last word after the others; -inf for <s>."""
    backoffs: np.ndarray
    """(rows,) float64: natural-log back-off weight of the n-gram as a context."""


class WordNgrams(NamedTuple):
    """N-gram model with its vocabulary."""

    model: NgramModel
    words: tuple[str, ...]
    """Words by id in the model. <s> is its start state and </s> its final log-probabilities: neither is a word."""
    counts: tuple[int, ...]
    """N-grams of orders 1, 2, ..., those with <s> and </s> included."""

    @property
    def unknown(self) -> int | None:
        """Id of the word that stands for unknown ones; None where the model has none."""
        return self.words.index(UNKNOWN) if UNKNOWN in self.words else None

    @property
    def token(self) -> str | None:
        """A word that begins with the symbol for a space, and so is a token of a recogniser; None where none does: the
        model counts words."""
        return next((word for word in self.words if word.startswith(SPACE_MARKS)), None)

    @classmethod
    def from_tables(cls, tables: Sequence[NgramTable], words: Sequence[str]) -> WordNgrams:
        """Model of tables of orders 1, 2, ... `words`: by id in the tables, from FIRST_WORD_ID on. Raises
        WeightsCorrupt, see `build_arrays`."""
        counts = tuple(len(table.words) for table in tables)
        return cls(build_arrays(tables, FIRST_WORD_ID + len(words)), tuple(words), counts)

    def reindexed(self, ids: Mapping[str, int]) -> NgramModel:
        """The model over another vocabulary, such as a recogniser's tokens. Words that `ids` lacks are left out."""
        model = self.model
        new = np.array([ids.get(word, -1) for word in self.words], np.int64)
        words = new[model.arc_words]
        sources = np.repeat(np.arange(model.states), np.diff(model.arc_offsets))
        order = np.lexsort((words, sources))
        order = order[words[order] >= 0]
        counts = np.bincount(sources[order], minlength=model.states)
        return model._replace(
            arc_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            arc_words=words[order].astype(np.int32),
            arc_logprobs=model.arc_logprobs[order],
            arc_states=model.arc_states[order],
        )

    def share_of(self, names: Sequence[str]) -> float:
        """Share of the words that are among `names`; <unk> is not counted."""
        words = set(self.words) - {UNKNOWN}
        return len(words.intersection(names)) / len(words) if words else 0.0

    def for_tokens(self, names: Sequence[str]) -> NgramModel:
        """The model over a recogniser's tokens, which have these names (Tokenizer.token_names). A token that it lacks
        has the probability of <unk>, or where there is none that of the rarest word. Nothing is impossible: no
        log-probability of a token or of an end is below LEAST_LOGPROB."""
        model = self.reindexed({name: token for token, name in enumerate(names)})
        logprob = -math.inf if self.unknown is None else self.model.step(0, self.unknown)[0]
        if math.isinf(logprob):
            known = self.model.arc_logprobs[: self.model.arc_offsets[1]]
            logprob = float(known[np.isfinite(known)].min(initial=0.0))
        model = _with_unigrams(model, missing_words(model, len(names)), logprob, 0)
        return model._replace(
            arc_logprobs=np.maximum(model.arc_logprobs, np.float32(LEAST_LOGPROB)),
            final_logprobs=np.maximum(model.final_logprobs, np.float32(LEAST_LOGPROB)),
        )

    def for_words(self, words: Sequence[str]) -> NgramModel:
        """The model over the words of a lexicon, by their indices. Words that it lacks have the probability of <unk>,
        or where there is none no probability at all (`missing_words`)."""
        model = self.reindexed({word: index for index, word in enumerate(words)})
        if self.unknown is None:
            return model
        logprob, state = self.model.step(0, self.unknown)
        return model if math.isinf(logprob) else _with_unigrams(model, missing_words(model, len(words)), logprob, state)

    def save(self, path: Path) -> None:
        """Write the model into one file, which `load` reads without parsing."""
        words = np.frombuffer(msgspec.json.encode(self.words), np.uint8)
        arrays = {**self.model.to_arrays(), "words": words, "counts": np.array(self.counts, np.int64)}
        path.write_bytes(save(arrays))  # save_file would let nobody else read it

    @classmethod
    def load(cls, path: Path) -> WordNgrams:
        """Model from a file that `save` wrote. Raises WeightsCorrupt."""
        try:
            with safe_open(path, "np") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            words = msgspec.json.decode(arrays.pop("words").tobytes(), type=tuple[str, ...])
            counts = tuple(map(int, arrays.pop("counts")))
        except (SafetensorError, OSError, KeyError, ValueError, TypeError, msgspec.DecodeError) as failure:
            raise WeightsCorrupt(
                f"the language model {path} cannot be read: {failure}", "a file of `asr-serve lm build`"
            ) from failure
        model = NgramModel.from_arrays(arrays)
        if len(model.arc_words) and not 0 <= model.arc_words.min() <= model.arc_words.max() < len(words):
            raise WeightsCorrupt(f"the language model {path} has arcs of words that it lacks: it has {len(words)}")
        return cls(model, words, counts)


def missing_words(model: NgramModel, vocabulary: int) -> np.ndarray:
    """Words below `vocabulary` that have no unigram, int32, rising."""
    return np.setdiff1d(np.arange(vocabulary, dtype=np.int32), model.arc_words[: model.arc_offsets[1]])


def _with_unigrams(model: NgramModel, words: np.ndarray, logprob: float, state: int) -> NgramModel:
    """The model with further words, which have one log-probability and lead to one state."""
    end = model.arc_offsets[1]
    arcs = np.concatenate([model.arc_words[:end], words])
    order = np.argsort(arcs, kind="stable")
    offsets = model.arc_offsets + len(words)
    offsets[0] = 0

    def extended(values: np.ndarray, value: float) -> np.ndarray:
        first = np.concatenate([values[:end], np.full(len(words), value, values.dtype)])
        return np.concatenate([first[order], values[end:]])

    return model._replace(
        arc_offsets=offsets,
        arc_words=np.concatenate([arcs[order], model.arc_words[end:]]),
        arc_logprobs=extended(model.arc_logprobs, logprob),
        arc_states=extended(model.arc_states, state),
    )


def build_arrays(tables: Sequence[NgramTable], vocabulary: int) -> NgramModel:
    """Arrays of a search from tables of orders 1, 2, ... over ids below `vocabulary`.

    A state is a context that has n-grams of its own or a back-off weight. Raises WeightsCorrupt for an n-gram that
    comes twice, or whose first words are no n-gram.
    """
    trie = _Trie.build(tables, vocabulary)
    is_context = np.zeros(trie.nodes, bool)
    is_context[trie.parents[1:]] = True
    is_state = is_context | (trie.backoffs != 0.0)
    is_state[0] = True
    is_state[trie.first_of_order[len(tables)] :] = False  # nothing follows the longest n-grams
    state_of: np.ndarray = np.cumsum(is_state) - 1

    def nearest_state(nodes: np.ndarray) -> np.ndarray:
        """The longest state that each n-gram ends in, itself included."""
        while not is_state[nodes].all():
            nodes = np.where(is_state[nodes], nodes, trie.suffixes[nodes])
        states: np.ndarray = state_of[nodes]
        return states

    states = np.flatnonzero(is_state)
    arcs = np.flatnonzero((trie.words >= FIRST_WORD_ID) & (np.arange(trie.nodes) > 0))  # by parent, then by word
    ends = np.flatnonzero(trie.words == END_ID)
    final = np.full(len(states), np.nan)
    final[state_of[trie.parents[ends]]] = trie.logprobs[ends]
    backoff_states = nearest_state(trie.suffixes[states])
    if np.isnan(final[0]):
        final[0] = -math.inf
    while np.isnan(final).any():  # an end that was not seen after a context is backed off to
        missing = np.flatnonzero(np.isnan(final))
        final[missing] = trie.backoffs[states[missing]] + final[backoff_states[missing]]
    begin = trie.find(np.zeros(1, np.int64), np.full(1, BEGIN_ID))
    counts = np.bincount(state_of[trie.parents[arcs]], minlength=len(states))
    model = NgramModel(
        arc_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        arc_words=(trie.words[arcs] - FIRST_WORD_ID).astype(np.int32),
        arc_logprobs=trie.logprobs[arcs].astype(np.float32),
        arc_states=nearest_state(arcs).astype(np.int32),
        backoff_states=np.concatenate([[-1], backoff_states[1:]]).astype(np.int32),
        backoff_logprobs=np.where(np.arange(len(states)) == 0, 0.0, trie.backoffs[states]).astype(np.float32),
        final_logprobs=final.astype(np.float32),
        start_state=int(nearest_state(begin.clip(min=0))[0]),
    )
    model.validate()
    return model


class _Trie(NamedTuple):
    """Trie of n-grams; node 0 is the empty one. Nodes are sorted by order, then by parent and word."""

    keys: np.ndarray
    """(nodes - 1,) int64, rising: parent * vocabulary + word of nodes 1, 2, ..."""
    parents: np.ndarray
    words: np.ndarray
    logprobs: np.ndarray
    backoffs: np.ndarray
    suffixes: np.ndarray
    """Node of the longest n-gram of the trie that each node ends in, without its first word at least."""
    first_of_order: list[int]
    """First node of order 0, 1, ..."""
    vocabulary: int

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @classmethod
    def build(cls, tables: Sequence[NgramTable], vocabulary: int) -> _Trie:
        keys = np.zeros(0, np.int64)
        trie = cls(
            keys, np.array([-1]), np.array([-1]), np.zeros(1), np.zeros(1), np.zeros(1, np.int64), [0], vocabulary
        )
        for order, table in enumerate(tables, start=1):
            parents = np.zeros(len(table.words), np.int64)
            for position in range(order - 1):
                parents = trie.find(parents, table.words[:, position])
                if (parents < 0).any():
                    shown = table.words[np.flatnonzero(parents < 0)[0]].tolist()
                    raise WeightsCorrupt(f"the n-gram of ids {shown} follows words that are no n-gram")
            keys = parents * vocabulary + table.words[:, -1]
            rows = np.argsort(keys, kind="stable")
            keys = keys[rows]
            if (np.diff(keys) == 0).any():
                shown = table.words[rows[np.flatnonzero(np.diff(keys) == 0)[0]]].tolist()
                raise WeightsCorrupt(f"the n-gram of ids {shown} comes twice")
            parents, words = parents[rows], table.words[rows, -1].astype(np.int64)
            suffixes = np.zeros(len(rows), np.int64)
            if order > 1:
                suffix, open_rows = trie.suffixes[parents], np.arange(len(rows))
                while len(open_rows):
                    found = trie.find(suffix[open_rows], words[open_rows])
                    suffixes[open_rows] = found.clip(min=0)
                    # Without its last word's 1-gram an n-gram ends in nothing.
                    open_rows = open_rows[(found < 0) & (suffix[open_rows] > 0)]
                    suffix[open_rows] = trie.suffixes[suffix[open_rows]]
            trie = trie._replace(
                keys=np.concatenate([trie.keys, keys]),
                parents=np.concatenate([trie.parents, parents]),
                words=np.concatenate([trie.words, words]),
                logprobs=np.concatenate([trie.logprobs, table.logprobs[rows]]),
                backoffs=np.concatenate([trie.backoffs, table.backoffs[rows]]),
                suffixes=np.concatenate([trie.suffixes, suffixes]),
                first_of_order=[*trie.first_of_order, trie.nodes],
            )
        return trie

    def find(self, parents: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Nodes of `parents` one word longer; -1 where the trie has none."""
        wanted = parents * self.vocabulary + words
        at = np.searchsorted(self.keys, wanted).clip(max=max(len(self.keys) - 1, 0))
        if not len(self.keys):
            return np.full(len(wanted), -1, np.int64)
        return np.where((self.keys[at] == wanted) & (parents >= 0), at + 1, -1)
