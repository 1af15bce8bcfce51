"""Compiler of nnet3 networks: config lines and components to a list of layers over frames at offsets.

Only what the node `output` depends on is compiled. Dropout and spectrum masks are identities, as they are outside
training. Batch-norms, scales and constants are folded into the matrices beside them, which is exact: a ReLU
commutes with a positive scale, and constants pass through sums to the bias of the next matrix.

Source: Kaldi's nnet3/nnet-descriptor and nnet3/nnet-*-component; TDNN-F: Povey et al. 2018,
doi:10.21437/Interspeech.2018-1417.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import numpy as np

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.checkpoints.kaldi_files import KaldiComponent, Nnet3

INPUT, IVECTOR, OUTPUT = "input", "ivector", "output"
"""Nodes of a network: features, speaker vector, scores."""
IDENTITIES = {"NoOpComponent", "DropoutComponent", "GeneralDropoutComponent", "SpecAugmentTimeMaskComponent"}
AFFINE = {"FixedAffineComponent", "AffineComponent", "NaturalGradientAffineComponent", "TdnnComponent"}
DEEPEST_DESCRIPTOR = 64
DESCRIPTOR_TOKEN = re.compile(r"\s*([(),]|[^\s(),]+)")
LINE_KEY = re.compile(r"(?:^|\s)([a-z-]+)=")


@dataclass
class Layer:
    """Layer of a compiled network: a matrix over frames of earlier layers, or a weighted sum of them."""

    name: str
    inputs: list[tuple[str, int]]
    """Layers (or INPUT) and the offsets in frames at which they are read."""
    weights: list[np.ndarray] = field(default_factory=list)
    """A matrix (width, width of the input) for each input; [] for a sum."""
    scales: list[float] = field(default_factory=list)
    """A factor for each input of a sum."""
    bias: np.ndarray | None = None
    ivector: np.ndarray | None = None
    """Matrix (width, i-vector width) over the speaker's vector."""
    relu: bool = False
    width: int = 0


class _Term(NamedTuple):
    """Numbers start to start + width of a layer at an offset, times a scale; width is the block's."""

    source: str
    offset: int
    start: int
    scale: np.ndarray


class _Block(NamedTuple):
    """Sum of terms."""

    terms: tuple[_Term, ...]
    bias: np.ndarray


class _Value(NamedTuple):
    """Value of a node: blocks end to end."""

    blocks: tuple[_Block, ...]
    exclusive: bool = False
    """Whether its one term is a layer that nothing else reads."""

    @property
    def width(self) -> int:
        return sum(len(block.bias) for block in self.blocks)

    @property
    def bias(self) -> np.ndarray:
        return np.concatenate([block.bias for block in self.blocks])

    def sole_source(self) -> str | None:
        """The layer that this value is, whole and unchanged but for a bias; None for any other value."""
        if len(self.blocks) != 1 or len(self.blocks[0].terms) != 1:
            return None
        term = self.blocks[0].terms[0]
        plain = term.offset == 0 and term.start == 0 and bool((term.scale == 1).all())
        return term.source if plain else None


class _Call(NamedTuple):
    """Function of a descriptor, or a name where `arguments` is None."""

    name: str
    arguments: tuple[_Call, ...] | None


class _Node(NamedTuple):
    kind: str
    settings: dict[str, str]


def compile_network(network: Nnet3) -> tuple[list[Layer], dict[str, int]]:
    """Layers in the order in which they run, the last of which has the scores, and the widths of INPUT and
    IVECTOR. Raises WeightsCorrupt for networks with parts that it does not know."""
    return _Compiler(network).run()


class _Compiler:
    def __init__(self, network: Nnet3) -> None:
        self._components = network.components
        self._nodes = _parse_lines(network.lines)
        if OUTPUT not in self._nodes or INPUT not in self._nodes:
            raise WeightsCorrupt("a network without the nodes input and output", "a chain model of nnet3")
        self._descriptors = {
            name: _parse_descriptor(node.settings.get("input", ""))
            for name, node in self._nodes.items()
            if node.kind in ("component-node", "output-node")
        }
        self._uses: Counter[str] = Counter()
        self._values: dict[str, _Value] = {}
        self._layers: dict[str, Layer] = {}
        self._widths: dict[str, int] = {}

    def run(self) -> tuple[list[Layer], dict[str, int]]:
        order = self._reachable()
        for name in order:
            self._values[name] = self._evaluate(name)
        last = self._values[OUTPUT]
        source = last.sole_source()
        if source is None or source not in self._layers or last.bias.any():
            source = self._materialize(OUTPUT, last).sole_source()
        layers = list(self._layers.values())
        if not layers or layers[-1].name != source:
            raise WeightsCorrupt("a network whose output is not its last layer", "a chain model of nnet3")
        widths = {name: self._widths.get(name, 0) for name in (INPUT, IVECTOR)}
        return layers, widths

    def _reachable(self) -> list[str]:
        """Nodes that the output depends on, each after those that it reads; counts how often each is read."""
        order: list[str] = []
        state: dict[str, int] = {}
        pending = [(OUTPUT, False)]
        while pending:
            name, read = pending.pop()
            if read:
                state[name] = 2
                order.append(name)
                continue
            if state.get(name) == 2:
                continue
            if state.get(name) == 1 or name not in self._nodes:
                problem = "reads itself" if name in self._nodes else "is missing"
                raise WeightsCorrupt(f"the node {name} of a network {problem}", "a network without recurrence")
            state[name] = 1
            pending.append((name, True))
            names = list(self._names(name))
            self._uses.update(names)
            pending += [(each, False) for each in names if state.get(each) != 2]
        return order

    def _names(self, name: str) -> Iterable[str]:
        node = self._nodes[name]
        if node.kind == "dim-range-node":
            yield node.settings.get("input-node", "")
        elif name in self._descriptors:
            yield from _names_in(self._descriptors[name])

    def _evaluate(self, name: str) -> _Value:
        node = self._nodes[name]
        if node.kind == "input-node":
            if name not in (INPUT, IVECTOR):
                raise WeightsCorrupt(f"the input {name} of a network", f"{INPUT} and {IVECTOR}")
            width = self._widths[name] = _integer(node, "dim")
            return _Value((_Block((_Term(name, 0, 0, np.ones(width)),), np.zeros(width)),))
        if node.kind == "dim-range-node":
            start = _integer(node, "dim-offset")
            return _sliced(self._values[node.settings["input-node"]], start, start + _integer(node, "dim"))
        value = self._described(self._descriptors[name])
        if node.kind == "output-node":
            return value
        if node.kind != "component-node":
            raise WeightsCorrupt(f"a node of the kind {node.kind}", "component-node, dim-range-node, input-node")
        component = self._components.get(node.settings.get("component", ""))
        if component is None:
            raise WeightsCorrupt(f"the node {name} without a component", "one that the file has")
        return self._applied(name, component, value)

    # --- descriptors ---------------------------------------------------------------------------------------

    def _described(self, call: _Call) -> _Value:
        if call.arguments is None:
            value = self._values[call.name]
            return value._replace(exclusive=value.exclusive and self._uses[call.name] == 1)
        arguments = call.arguments
        match call.name, len(arguments):
            case "Append", _:
                return _Value(tuple(block for each in arguments for block in self._described(each).blocks))
            case "Sum", _:
                return reduce(_sum, (self._described(each) for each in arguments))
            case "Offset", 2:
                shift = int(_constant(arguments[1]))
                return _mapped(self._described(arguments[0]), lambda term: term._replace(offset=term.offset + shift))
            case "Scale", 2:
                factor = _constant(arguments[0])
                value = self._described(arguments[1])
                value = _mapped(value, lambda term: term._replace(scale=term.scale * factor))
                return _Value(tuple(block._replace(bias=block.bias * factor) for block in value.blocks))
            case "ReplaceIndex", 3:
                value = self._described(arguments[0])
                sources = {term.source for block in value.blocks for term in block.terms}
                if sources == {IVECTOR} and arguments[1].name == "t":
                    return value
        raise _unknown(call)

    # --- components ----------------------------------------------------------------------------------------

    def _applied(self, name: str, component: KaldiComponent, value: _Value) -> _Value:
        kind = component.kind
        if kind in IDENTITIES:
            several = any(len({t.source for t in block.terms} - {INPUT, IVECTOR}) > 1 for block in value.blocks)
            return self._materialize(name, value) if several else value
        if kind == "BatchNormComponent":
            return self._normalized(component, value)
        if kind == "RectifiedLinearComponent":
            source = value.sole_source()
            if source in self._layers and value.exclusive and not value.bias.any() and source is not None:
                self._layers[source].relu = True
                return value
            value = self._materialize(name, value, relu=True)
            return value._replace(exclusive=True)
        if kind == "LinearComponent":
            return self._multiplied(name, component.array("<Params>"), None, (0,), value)
        if kind in AFFINE:
            offsets = component.array("<TimeOffsets>").tolist() if kind == "TdnnComponent" else (0,)
            bias = component.array("<BiasParams>")
            return self._multiplied(name, component.array("<LinearParams>"), bias, offsets, value)
        raise WeightsCorrupt(f"the component {name} of the kind {kind}", "affine, TDNN, batch-norm, ReLU and dropout")

    def _normalized(self, component: KaldiComponent, value: _Value) -> _Value:
        mean = component.array("<StatsMean>").astype(np.float64)
        variance = np.maximum(component.array("<StatsVar>").astype(np.float64), 0)
        repeats, rest = divmod(value.width, len(mean))
        if rest or mean.shape != variance.shape:
            raise WeightsCorrupt(f"a batch-norm of {len(mean)} numbers over {value.width}", "a divisor of them")
        scale = np.tile(component.number("<TargetRms>") / np.sqrt(variance + component.number("<Epsilon>")), repeats)
        shift = -np.tile(mean, repeats) * scale
        source = value.sole_source()
        if source in self._layers and value.exclusive and not value.bias.any() and source is not None:
            _scale_rows(self._layers[source], scale)
            return _Value((value.blocks[0]._replace(bias=shift),))
        blocks, at = [], 0
        for block in value.blocks:
            part = slice(at, at + len(block.bias))
            terms = tuple(term._replace(scale=term.scale * scale[part]) for term in block.terms)
            blocks.append(_Block(terms, block.bias * scale[part] + shift[part]))
            at += len(block.bias)
        return _Value(tuple(blocks))

    def _multiplied(
        self, name: str, matrix: np.ndarray, bias: np.ndarray | None, offsets: Iterable[int], value: _Value
    ) -> _Value:
        """Makes a layer of a matrix over `value` at each of `offsets`."""
        shifts, width = list(offsets), value.width
        if matrix.ndim != 2 or matrix.shape[1] != width * len(shifts) or not shifts:
            raise WeightsCorrupt(
                f"the matrix {matrix.shape} of {name}", f"{width} columns for each of {len(shifts)} offsets"
            )
        matrix = matrix.astype(np.float64)
        total = np.zeros(len(matrix)) if bias is None or not len(bias) else bias.astype(np.float64)
        by_input: dict[tuple[str, int], np.ndarray] = {}
        at = 0
        for shift in shifts:
            for block in value.blocks:
                columns = matrix[:, at : at + len(block.bias)]
                at += len(block.bias)
                total = total + columns @ block.bias
                for term in block.terms:
                    key = (term.source, 0 if term.source == IVECTOR else term.offset + shift)
                    whole = by_input.setdefault(key, np.zeros((len(matrix), self._width(term.source))))
                    whole[:, term.start : term.start + len(term.scale)] += columns * term.scale
        ivector = by_input.pop((IVECTOR, 0), None)
        keys = sorted(by_input)
        layer = Layer(name, keys, [by_input[key] for key in keys], bias=total, ivector=ivector, width=len(matrix))
        return self._added(layer)

    def _materialize(self, name: str, value: _Value, relu: bool = False) -> _Value:
        """Makes a layer of a sum. Its constant stays outside, unless a ReLU follows."""
        if len(value.blocks) != 1:
            raise WeightsCorrupt(f"the node {name}, which appends sums of layers", "sums and appended layers apart")
        block = value.blocks[0]
        plain = not (relu and block.bias.any())
        for term in block.terms:
            plain &= term.start == 0 and len(term.scale) == self._width(term.source) and term.source != IVECTOR
            plain &= bool((term.scale == term.scale[0]).all())
        if not plain:
            made = self._multiplied(name, np.eye(value.width), None, (0,), value)
            self._layers[name].relu = relu
            return made
        inputs = [(term.source, term.offset) for term in block.terms]
        scales = [float(term.scale[0]) for term in block.terms]
        made = self._added(Layer(name, inputs, scales=scales, relu=relu, width=value.width))
        return _Value((made.blocks[0]._replace(bias=block.bias),), made.exclusive)

    def _added(self, layer: Layer) -> _Value:
        self._layers[layer.name] = layer
        block = _Block((_Term(layer.name, 0, 0, np.ones(layer.width)),), np.zeros(layer.width))
        return _Value((block,), exclusive=True)

    def _width(self, source: str) -> int:
        return self._layers[source].width if source in self._layers else self._widths[source]


def _scale_rows(layer: Layer, scale: np.ndarray) -> None:
    """Multiplies what a layer computes, by positive factors."""
    if layer.weights:
        layer.weights = [weight * scale[:, None] for weight in layer.weights]
    else:
        layer.weights = [np.diag(factor * scale) for factor in layer.scales]
        layer.scales = []
    layer.bias = None if layer.bias is None else layer.bias * scale
    layer.ivector = None if layer.ivector is None else layer.ivector * scale[:, None]


def _mapped(value: _Value, change: Callable[[_Term], _Term]) -> _Value:
    return _Value(tuple(_Block(tuple(change(term) for term in block.terms), block.bias) for block in value.blocks))


def _sliced(value: _Value, start: int, end: int) -> _Value:
    if not 0 <= start < end <= value.width:
        raise WeightsCorrupt(f"numbers {start} to {end} of a node that has {value.width}", "a part of them")
    blocks, at = [], 0
    for block in value.blocks:
        size = len(block.bias)
        first, last = max(start - at, 0), min(end - at, size)
        if first < last:
            terms = tuple(term._replace(start=term.start + first, scale=term.scale[first:last]) for term in block.terms)
            blocks.append(_Block(terms, block.bias[first:last]))
        at += size
    return _Value(tuple(blocks))


def _sum(first: _Value, second: _Value) -> _Value:
    if first.width != second.width:
        raise WeightsCorrupt(f"a sum of {first.width} and {second.width} numbers", "equally many")
    ends = sorted({end for value in (first, second) for end in np.cumsum([len(b.bias) for b in value.blocks]).tolist()})
    blocks, start = [], 0
    for end in ends:
        parts = [_sliced(value, start, end).blocks[0] for value in (first, second)]
        blocks.append(_Block(_merged(parts[0].terms + parts[1].terms), parts[0].bias + parts[1].bias))
        start = end
    return _Value(tuple(blocks))


def _merged(terms: Iterable[_Term]) -> tuple[_Term, ...]:
    """Terms with those of the same numbers added up."""
    found: dict[tuple[str, int, int], _Term] = {}
    for term in terms:
        before = found.get(term[:3])
        found[term[:3]] = term if before is None else term._replace(scale=before.scale + term.scale)
    return tuple(found.values())


# --- text -------------------------------------------------------------------------------------------------


def _parse_lines(lines: Iterable[str]) -> dict[str, _Node]:
    nodes = {}
    for line in lines:
        text = line.split("#")[0].strip()
        if not text:
            continue
        kind, _, rest = text.partition(" ")
        keys = list(LINE_KEY.finditer(rest))
        ends = [key.start() for key in keys[1:]] + [len(rest)]
        settings = {key[1]: rest[key.end() : end].strip() for key, end in zip(keys, ends, strict=True)}
        if "name" not in settings:
            raise WeightsCorrupt(f"the line {line[:200]!r} of a network", "kind name=... with further settings")
        nodes[settings["name"]] = _Node(kind, settings)
    return nodes


def _parse_descriptor(text: str) -> _Call:
    tokens = DESCRIPTOR_TOKEN.findall(text)
    at = 0

    def parse(depth: int) -> _Call:
        nonlocal at
        if at >= len(tokens) or tokens[at] in "()," or depth > DEEPEST_DESCRIPTOR:
            raise WeightsCorrupt(f"the descriptor {text[:200]!r}", "names and functions of them")
        name = tokens[at]
        at += 1
        if at >= len(tokens) or tokens[at] != "(":
            return _Call(name, None)
        arguments = []
        while tokens[at] != ")":
            at += 1
            arguments.append(parse(depth + 1))
            if at >= len(tokens) or tokens[at] not in ",)":
                raise WeightsCorrupt(f"the descriptor {text[:200]!r}", "a comma or a bracket after each argument")
        at += 1
        return _Call(name, tuple(arguments))

    call = parse(0)
    if at != len(tokens):
        raise WeightsCorrupt(f"the descriptor {text[:200]!r}", "one name or function")
    return call


def _names_in(call: _Call) -> Iterable[str]:
    """Nodes that a descriptor names, as often as it does."""
    if call.arguments is None:
        yield call.name
        return
    match call.name:
        case "Append" | "Sum":
            nodes = call.arguments
        case "Scale":
            nodes = call.arguments[1:]
        case "Offset" | "ReplaceIndex":
            nodes = call.arguments[:1]
        case _:
            raise _unknown(call)
    for each in nodes:
        yield from _names_in(each)


def _unknown(call: _Call) -> WeightsCorrupt:
    return WeightsCorrupt(
        f"the descriptor {call.name} with {len(call.arguments or ())} arguments",
        f"Append, Sum, Offset(x, frames), Scale(factor, x), ReplaceIndex({IVECTOR}, t, 0)",
    )


def _constant(call: _Call) -> float:
    try:
        if call.arguments is None:
            return float(call.name)
    except ValueError:
        pass
    raise WeightsCorrupt(f"{call.name} in a descriptor", "a number")


def _integer(node: _Node, key: str) -> int:
    try:
        return int(node.settings[key])
    except (KeyError, ValueError) as failure:
        raise WeightsCorrupt(f"the node {node.settings['name']} without {key}", "a whole number") from failure
