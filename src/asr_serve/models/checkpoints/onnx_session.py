"""ONNX graphs that run as they are, with values from inside them as outputs too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asr_serve.errors import WeightsCorrupt, WeightsMissing


class OnnxSession:
    """A graph that runs on the calling thread alone. Any number of threads may call it."""

    def __init__(
        self,
        graph: bytes | Path,
        more: Sequence[str] = (),
        *,
        lengths: Sequence[tuple[str, int, str]] = (),
        change: Callable[[OnnxGraphEditor], None] | None = None,
    ) -> None:
        """`more`: values inside that are made outputs, after those there are. `lengths`: inputs that may be of any
        length: name, dimension and what to call it, as where a number for all phonemes becomes one for each; where
        the graph's arithmetic allows that. `change`: what is done to its nodes before.

        Raises WeightsMissing when the packages that read and run it are not installed, WeightsCorrupt when it is
        no graph.
        """
        try:
            import onnx
            import onnxruntime
            from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
            from onnxruntime.capi import onnxruntime_pybind11_state as state
        except ModuleNotFoundError as missing:
            raise WeightsMissing(
                f"a voice that is an ONNX graph needs the Python package {missing.name}",
                todo="pip install 'asr-serve[voice]'",
            ) from missing
        what = str(graph) if isinstance(graph, Path) else "the graph"
        data = graph.read_bytes() if isinstance(graph, Path) else graph
        try:
            if more or lengths or change:
                model = onnx.load_from_string(data)
                if change:
                    change(OnnxGraphEditor(model.graph))
                model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in more)
                for name, dimension, length in lengths:
                    found = next(each for each in model.graph.input if each.name == name)
                    found.type.tensor_type.shape.dim[dimension].dim_param = length
                data = model.SerializeToString()
            options = onnxruntime.SessionOptions()
            # The cores are torch's: no pool beside its own.
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            options.log_severity_level = 3
            self._session: Any = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except (
            DecodeError,
            state.Fail,
            state.InvalidGraph,
            state.InvalidProtobuf,
            state.InvalidArgument,
        ) as failure:
            raise WeightsCorrupt(f"{what} cannot be read as a graph", "an .onnx file", "get it again") from failure

    def __call__(self, **inputs: np.ndarray) -> list[np.ndarray]:
        """All outputs, in order; then those that were asked for besides."""
        return list(self._session.run(None, inputs))


class OnnxGraphEditor:
    """A graph's nodes, while they are changed: what was computed inside, or drawn, may come from outside."""

    FLOAT, INT64, INT_ATTRIBUTE = 1, 7, 2
    """As the format counts types."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def nodes(self, op: str) -> list[Any]:
        """All of a kind, in order."""
        return [node for node in self._graph.node if node.op_type == op]

    def inputs(self) -> list[str]:
        """What comes from outside."""
        return [each.name for each in self._graph.input]

    def output(self, value: str) -> None:
        """A value from inside, after the outputs there are."""
        self._graph.output.add(name=value)

    def consumers(self, value: str) -> list[Any]:
        """The nodes that take a value."""
        return [node for node in self._graph.node if value in node.input]

    def is_produced(self, value: str) -> bool:
        """Whether some node makes it."""
        return any(value in node.output for node in self._graph.node)

    def input(self, name: str, shape: Sequence[int | str]) -> None:
        """A new float32 input. A dimension with a name may be of any length."""
        kind = self._graph.input.add(name=name).type.tensor_type
        kind.elem_type = self.FLOAT
        for size in shape:
            if isinstance(size, str):
                kind.shape.dim.add(dim_param=size)
            else:
                kind.shape.dim.add(dim_value=size)

    def constant(self, name: str, values: Sequence[int] | int) -> None:
        """Whole numbers: a list of them, or one without a dimension."""
        one = isinstance(values, int)
        given = [values] if isinstance(values, int) else list(values)
        self._graph.initializer.add(
            name=name, data_type=self.INT64, dims=[] if one else [len(given)], int64_data=given
        )

    def node(self, op: str, inputs: Sequence[str], output: str, **attributes: int) -> None:
        """A new one, behind those that make its inputs. Attributes are whole numbers."""
        nodes = list(self._graph.node)
        behind = max((place for place, node in enumerate(nodes) if set(inputs) & set(node.output)), default=-1) + 1
        made = self._graph.node.add(op_type=op, name=output, input=inputs, output=[output])
        for name, value in attributes.items():
            made.attribute.add(name=name, type=self.INT_ATTRIBUTE, i=value)
        nodes.insert(behind, made)
        self._order(nodes)

    def remove_node(self, output: str) -> None:
        """The node that makes it."""
        self._order([each for each in self._graph.node if output not in each.output])

    def replace_input(self, value: str, other: str, readers: Sequence[Any] | None = None) -> None:
        """Whoever takes `value` takes the other; or those nodes alone."""
        for node in self.consumers(value) if readers is None else readers:
            for place, name in enumerate(node.input):
                if name == value:
                    node.input[place] = other

    def _order(self, nodes: Sequence[Any]) -> None:
        copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
        del self._graph.node[:]
        self._graph.node.extend(copies)
