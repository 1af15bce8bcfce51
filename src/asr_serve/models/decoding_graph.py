"""Decoding graph: a weighted transducer from acoustic labels to words, as arrays (CSR), for WFST searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from asr_serve.errors import WeightsCorrupt, WeightsMissing
from asr_serve.models.ngram import NgramModel
from asr_serve.transfer.checksum import checksum

GRAPH_FILE, GRAPH_INFO_FILE = "graph.safetensors", "graph.json"
"""Names of a decoding graph in a checkpoint folder or a folder of its own, and of its GraphInfo there."""
WORD_BOUNDARIES = ("nonword", "begin", "end", "internal", "singleton")
"""Kinds of phones by their place in a word, numbered as in `label_boundaries`."""


class GraphSearchOptions(NamedTuple):
    """Pruning limits of a search of a decoding graph, with Kaldi's meaning. The defaults are those of Kaldi's decoders
    for chain models."""

    beam: float = 15.0
    """Paths this much more costly than the best are dropped, natural log."""
    lattice_beam: float = 6.0
    """Alternatives this much more costly than the best path are kept for the n-best list, natural log."""
    acoustic_scale: float = 1.0
    """Factor of the model's scores."""
    max_active: int = 7_000
    """Most paths of a frame."""
    min_active: int = 200
    """Paths of a frame that the beam leaves at least."""
    graph_scale: float = 1.0
    """Factor of the costs of the graph and its language model in the probabilities of a lattice's paths, which the
    confidences and `minimum_risk` follow."""
    minimum_risk: bool = False
    """Whether a result has the words of minimum Bayes risk instead of those of the best path."""


class GraphInfo(msgspec.Struct, frozen=True):
    """Origin of a decoding graph that `asr-serve graph build` wrote, beside it as JSON."""

    model: str
    """Name or folder of the model for whose tokens it was built."""
    tokens: int
    """Number of the model's tokens."""
    tokens_checksum: str
    """Checksum of their names and the blank (`checksum_tokens`)."""
    words: int
    spellings: int
    language_model: str
    """Name of its file."""
    lexicon: str | None
    """Name of its file; None: the model's tokenizer spelled the words."""
    weight: float
    """Factor of the language model's log-probabilities."""
    on_the_fly: bool
    """Whether the language model is composed with the graph while it is searched."""

    @classmethod
    def load(cls, folder: Path) -> GraphInfo:
        """Origin of the graph in a folder. Raises WeightsMissing, WeightsCorrupt."""
        path = folder / GRAPH_INFO_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError as failure:
            raise WeightsMissing(f"no {GRAPH_INFO_FILE} in {folder}", "a folder of asr-serve graph build") from failure
        except (OSError, msgspec.DecodeError) as failure:
            raise WeightsCorrupt(f"{path} cannot be read: {failure}", "a file of asr-serve graph build") from failure

    def save(self, folder: Path) -> None:
        (folder / GRAPH_INFO_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def checksum_tokens(names: Sequence[str], blank: int) -> str:
    """Checksum of a model's tokens, 64 bits as hexadecimal digits."""
    return f"{checksum(msgspec.json.encode((blank, list(names)))):016x}"


class DecodingGraph(NamedTuple):
    """Weighted transducer over the columns of a model's scores. Costs are negative natural logs.

    Arcs of a state lie together, those that consume a frame before those that do not. Where `language_model` is
    given, the graph is composed with it while it is searched: the cost of a word is added on the arc that outputs
    it, and the final cost of the language model's state at the end.

    Source: Mohri, Pereira and Riley 2002, Weighted finite-state transducers in speech recognition.
    """

    arc_offsets: np.ndarray
    """(states + 1,) int32: arcs of state s are arc_offsets[s] to arc_offsets[s + 1]."""
    epsilon_offsets: np.ndarray
    """(states,) int32: first arc of each state that consumes no frame."""
    arc_labels: np.ndarray
    """(arcs,) int32: input label: an index into `label_columns`; -1 for an arc that consumes no frame."""
    arc_words: np.ndarray
    """(arcs,) int32: word that the arc outputs; -1 for none."""
    arc_costs: np.ndarray
    """(arcs,) float32."""
    arc_states: np.ndarray
    """(arcs,) int32: state to which the arc leads."""
    final_costs: np.ndarray
    """(states,) float32: inf for states that are not final."""
    label_columns: np.ndarray
    """(labels,) int32: column of the scores that an input label consumes. Several labels may share one (transition
    ids of one pdf)."""
    label_phones: np.ndarray
    """(labels,) int32: phone of each label, for times of words and detection of silence; -1 where unknown."""
    phone_boundaries: np.ndarray
    """(phones,) int8: index into WORD_BOUNDARIES of each phone; empty where words are not marked by phones."""
    start_state: int
    language_model: NgramModel | None = None

    @property
    def states(self) -> int:
        return len(self.final_costs)

    def save(self, folder: Path) -> None:
        """Write the graph into a checkpoint folder."""
        (folder / GRAPH_FILE).write_bytes(save(self.to_arrays()))  # save_file would let nobody else read it

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays by name, those of the language model included; the inverse of `from_arrays`."""
        arrays = {k: np.asarray(v) for k, v in self._asdict().items() if k not in ("start_state", "language_model")}
        arrays["start_state"] = np.array([self.start_state], np.int64)
        if self.language_model is not None:
            arrays |= self.language_model.to_arrays("language_model.")
        return arrays

    @classmethod
    def load(cls, path: Path) -> DecodingGraph:
        """Graph from a file that `save` wrote. Raises WeightsCorrupt."""
        try:
            arrays = load_file(path)
        except (SafetensorError, OSError) as failure:
            raise WeightsCorrupt(f"the decoding graph {path} cannot be read: {failure}") from failure
        return cls.from_arrays(arrays)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> DecodingGraph:
        """Graph from the arrays of a file. Raises WeightsCorrupt for arrays that no search may read."""
        names = [name for name in cls._fields if name != "language_model"]
        missing = [name for name in names if name not in arrays]
        if missing:
            raise WeightsCorrupt(f"a decoding graph without {', '.join(missing)}", f"it has {', '.join(names)}")
        values: dict[str, Any] = {name: arrays[name] for name in names}
        model = None
        if any(name.startswith("language_model.") for name in arrays):
            model = NgramModel.from_arrays(arrays, "language_model.")
        values["start_state"] = int(values["start_state"].reshape(-1)[0])
        graph = cls(**values, language_model=model)
        graph.validate()
        return graph

    def validate(self) -> None:
        """Raises WeightsCorrupt, see `from_arrays`."""
        states, arcs, labels = len(self.final_costs), len(self.arc_costs), len(self.label_columns)
        expected = {
            "arc_offsets": (np.int32, states + 1),
            "epsilon_offsets": (np.int32, states),
            "arc_labels": (np.int32, arcs),
            "arc_words": (np.int32, arcs),
            "arc_costs": (np.float32, arcs),
            "arc_states": (np.int32, arcs),
            "final_costs": (np.float32, states),
            "label_columns": (np.int32, labels),
            "label_phones": (np.int32, labels),
            "phone_boundaries": (np.int8, len(self.phone_boundaries)),
        }
        for name, (dtype, length) in expected.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != (length,):
                raise WeightsCorrupt(
                    f"{name} of a decoding graph is {array.dtype}{array.shape}", f"{np.dtype(dtype)}({length},)"
                )
        offsets = self.arc_offsets
        if not states or offsets[0] != 0 or offsets[-1] != arcs or (np.diff(offsets) < 0).any():
            raise WeightsCorrupt("arc_offsets of a decoding graph do not rise from 0 to the number of arcs")
        if (self.epsilon_offsets < offsets[:-1]).any() or (self.epsilon_offsets > offsets[1:]).any():
            raise WeightsCorrupt("epsilon_offsets of a decoding graph lie outside their states")
        consumes = np.arange(arcs) < np.repeat(self.epsilon_offsets, np.diff(offsets))
        if ((self.arc_labels >= 0) != consumes).any() or (self.arc_labels >= labels).any():
            raise WeightsCorrupt(f"labels of a decoding graph are out of range or order; it has {labels}")
        if arcs and (self.arc_states.min() < 0 or self.arc_states.max() >= states):
            raise WeightsCorrupt(f"arcs of a decoding graph lead to states that it lacks; it has {states}")
        if (
            np.isnan(self.arc_costs).any()
            or np.isnan(self.final_costs).any()
            or (labels and self.label_columns.min() < 0)
        ):
            raise WeightsCorrupt("a decoding graph has costs that are no numbers, or columns below 0")
        if not 0 <= self.start_state < states:
            raise WeightsCorrupt(f"a decoding graph starts in state {self.start_state}; it has {states}")
