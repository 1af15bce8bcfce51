"""N-gram language model with back-off, as sorted arrays that searches on CPU and GPU read alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from asr_serve.errors import WeightsCorrupt


class NgramModel(NamedTuple):
    """Back-off n-gram model: a state for each context, and an arc for each n-gram that was seen after it.

    All log-probabilities are natural. State 0 is the empty context, and has an arc for every word of the
    vocabulary whose unigram is known. A word that has no arc in a state costs the state's back-off weight, and is
    looked up in the state's back-off state; one that state 0 lacks has log-probability -inf. The state after a word
    is the longest context that ends in it and that has n-grams of its own.

    Source: Katz 1987; the arrays are those of a weighted acceptor whose failure arcs are the back-offs.
    """

    arc_offsets: np.ndarray
    """(states + 1,) int64: arcs of state s are arc_offsets[s] to arc_offsets[s + 1]."""
    arc_words: np.ndarray
    """(arcs,) int32: word of each arc, rising within a state."""
    arc_logprobs: np.ndarray
    """(arcs,) float32: log-probability of the word in that context."""
    arc_states: np.ndarray
    """(arcs,) int32: state after the word."""
    backoff_states: np.ndarray
    """(states,) int32: context without its first word; -1 for state 0. Each is a state of a shorter context."""
    backoff_logprobs: np.ndarray
    """(states,) float32: back-off weight; 0 for state 0."""
    final_logprobs: np.ndarray
    """(states,) float32: log-probability of the end of the sentence, back-off included; -inf where there is none."""
    start_state: int
    """Context at the start of a sentence."""

    @property
    def states(self) -> int:
        return len(self.backoff_states)

    def step(self, state: int, word: int) -> tuple[float, int]:
        """Log-probability of a word (int; any value) in a state, and the state after it. A word that the model lacks
        leads to state 0 with -inf. Reference for the batched and the native queries."""
        logprob = 0.0
        while state >= 0:
            first, end = self.arc_offsets[state], self.arc_offsets[state + 1]
            arc = first + np.searchsorted(self.arc_words[first:end], word)
            if arc < end and self.arc_words[arc] == word:
                return logprob + float(self.arc_logprobs[arc]), int(self.arc_states[arc])
            logprob += float(self.backoff_logprobs[state])
            state = int(self.backoff_states[state])
        return float("-inf"), 0

    def with_epsilon_backoffs(self) -> NgramModel:
        """Model as it is where back-offs are epsilon arcs of a transducer: a word, or the end, that is likelier by way
        of the back-off has that log-probability, and leads to the state that the shorter context leads to.

        Kaldi's decoders search transducers of that kind, and models that are published for them are tuned so.
        """
        sources = np.repeat(np.arange(self.states), np.diff(self.arc_offsets))
        keys = sources << 32 | self.arc_words
        logprobs, states, finals = self.arc_logprobs.copy(), self.arc_states.copy(), self.final_logprobs.copy()
        orders = np.zeros(self.states, np.int64)
        reached = self.backoff_states
        while (reached >= 0).any():
            orders += reached >= 0
            reached = np.where(reached >= 0, self.backoff_states[reached], -1)
        for order in range(1, int(orders.max(initial=0)) + 1):  # shorter contexts are done before longer ones
            arcs = np.flatnonzero(orders[sources] == order)
            context, total = sources[arcs], np.zeros(len(arcs), np.float32)
            while len(arcs):
                total = total + self.backoff_logprobs[context]
                context = self.backoff_states[context].astype(np.int64)
                wanted = context << 32 | self.arc_words[arcs]
                found = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
                known = keys[found] == wanted
                likelier = known & (total + logprobs[found] > logprobs[arcs])
                logprobs[arcs[likelier]] = (total + logprobs[found])[likelier]
                states[arcs[likelier]] = states[found[likelier]]
                rest = ~known & (context > 0)
                arcs, context, total = arcs[rest], context[rest], total[rest]
            ends = np.flatnonzero(orders == order)
            finals[ends] = np.maximum(finals[ends], self.backoff_logprobs[ends] + finals[self.backoff_states[ends]])
        return self._replace(arc_logprobs=logprobs, arc_states=states, final_logprobs=finals)

    def to_arrays(self, prefix: str = "") -> dict[str, np.ndarray]:
        """Arrays by name, for a file; the inverse of `from_arrays`."""
        arrays = {prefix + name: np.asarray(value) for name, value in self._asdict().items() if name != "start_state"}
        return arrays | {prefix + "start_state": np.array([self.start_state], np.int64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], prefix: str = "") -> NgramModel:
        """Model from the arrays of a file. Raises WeightsCorrupt for arrays that no search may read: of other lengths
        or types, with states out of range, or with back-offs that do not end in state 0."""
        missing = [name for name in cls._fields if prefix + name not in arrays]
        if missing:
            raise WeightsCorrupt(f"a language model without {', '.join(missing)}", f"it has {', '.join(cls._fields)}")
        values: dict[str, Any] = {name: arrays[prefix + name] for name in cls._fields}
        model = cls(**values | {"start_state": int(values["start_state"].reshape(-1)[0])})
        model.validate()
        return model

    def validate(self) -> None:
        """Raises WeightsCorrupt, see `from_arrays`."""
        states, arcs = len(self.backoff_states), len(self.arc_words)
        expected = {
            "arc_offsets": (np.int64, states + 1),
            "arc_words": (np.int32, arcs),
            "arc_logprobs": (np.float32, arcs),
            "arc_states": (np.int32, arcs),
            "backoff_states": (np.int32, states),
            "backoff_logprobs": (np.float32, states),
            "final_logprobs": (np.float32, states),
        }
        for name, (dtype, length) in expected.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != (length,):
                raise WeightsCorrupt(
                    f"{name} of a language model is {array.dtype}{array.shape}", f"{np.dtype(dtype)}({length},)"
                )
        offsets, backoffs = self.arc_offsets, self.backoff_states
        if not states or offsets[0] != 0 or offsets[-1] != arcs or (np.diff(offsets) < 0).any():
            raise WeightsCorrupt("arc_offsets of a language model do not rise from 0 to the number of arcs")
        if arcs and (self.arc_states.min() < 0 or self.arc_states.max() >= states):
            raise WeightsCorrupt(f"arcs of a language model lead to states that it lacks; it has {states}")
        same_state = np.ones(max(arcs - 1, 0), bool)
        inner = offsets[1:-1]
        same_state[inner[(inner > 0) & (inner < arcs)] - 1] = False
        if ((np.diff(self.arc_words) <= 0) & same_state).any():
            raise WeightsCorrupt("words of a state of a language model do not rise")
        if backoffs[0] != -1 or (backoffs[1:] < 0).any() or (backoffs >= states).any():
            raise WeightsCorrupt("back-off states of a language model are out of range")
        reached, hops = backoffs, 0
        while (reached > 0).any():
            reached, hops = np.where(reached > 0, backoffs[reached], reached), hops + 1
            if hops > states:
                raise WeightsCorrupt("back-offs of a language model run in a circle")
        if not 0 <= self.start_state < states:
            raise WeightsCorrupt(f"a language model starts in state {self.start_state}; it has {states}")
