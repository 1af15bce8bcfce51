"""ONNX sessions whose graph may be edited before they run, with inner values as additional outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asr_serve.errors import WeightsCorrupt, WeightsMissing


class OnnxSession:
    """ONNX session that runs on the calling thread alone. Any number of threads may call it."""

    def __init__(
        self,
        graph: bytes | Path,
        more: Sequence[str] = (),
        *,
        lengths: Sequence[tuple[str, int, str]] = (),
        change: Callable[[OnnxGraphEditor], None] | None = None,
    ) -> None:
        """Loads a graph. `more`: inner values that become outputs, after the graph's own. `lengths`: inputs whose
        dimension becomes dynamic (input name, dimension, its new name), as where one number for all phonemes becomes
        one for each; only where the graph's arithmetic allows that. `change`: edits the nodes first.

        Raises WeightsMissing when the packages that read and run it are not installed, WeightsCorrupt when it is no
        graph."""
        try:
            import onnx
            import onnxruntime
            from google.protobuf.message import DecodeError
            from onnxruntime.capi import onnxruntime_pybind11_state as state
        except ModuleNotFoundError as missing:
            raise WeightsMissing(
                f"a voice that is an ONNX graph needs the Python package {missing.name}",
                todo="pip install onnx onnxruntime",
            ) from missing
        source = str(graph) if isinstance(graph, Path) else "the graph"
        data = graph.read_bytes() if isinstance(graph, Path) else graph
        try:
            if more or lengths or change:
                model = onnx.load_from_string(data)
                if change:
                    change(OnnxGraphEditor(model.graph))
                model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in more)
                for name, dimension, length in lengths:
                    graph_input = next(each for each in model.graph.input if each.name == name)
                    graph_input.type.tensor_type.shape.dim[dimension].dim_param = length
                data = model.SerializeToString()
            options = onnxruntime.SessionOptions()
            # torch uses the cores: no thread pool beside its own.
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            options.log_severity_level = 3
            self._session: Any = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except (DecodeError, state.Fail, state.InvalidGraph, state.InvalidProtobuf, state.InvalidArgument) as failure:
            raise WeightsCorrupt(f"{source} cannot be read as a graph", "an .onnx file", "get it again") from failure

    def __call__(self, **inputs: np.ndarray) -> list[np.ndarray]:
        """Returns all outputs in order, then the additional ones."""
        return list(self._session.run(None, inputs))


class OnnxGraphEditor:
    """Editor of a graph: inner values, and random numbers drawn inside, may become inputs or outputs."""

    FLOAT, INT64, INT_ATTRIBUTE = 1, 7, 2
    """Type numbers of the ONNX format."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def nodes(self, op: str) -> list[Any]:
        """Returns all nodes of an operator, in order."""
        return [node for node in self._graph.node if node.op_type == op]

    def inputs(self) -> list[str]:
        """Returns the names of the graph's inputs."""
        return [each.name for each in self._graph.input]

    def output(self, value: str) -> None:
        """Adds an inner value to the outputs, after those of the graph."""
        self._graph.output.add(name=value)

    def consumers(self, value: str) -> list[Any]:
        """Returns the nodes that read a value."""
        return [node for node in self._graph.node if value in node.input]

    def is_produced(self, value: str) -> bool:
        """Returns whether some node computes a value."""
        return any(value in node.output for node in self._graph.node)

    def input(self, name: str, shape: Sequence[int | str]) -> None:
        """Adds a float32 input. A dimension given by name may have any length."""
        kind = self._graph.input.add(name=name).type.tensor_type
        kind.elem_type = self.FLOAT
        for size in shape:
            if isinstance(size, str):
                kind.shape.dim.add(dim_param=size)
            else:
                kind.shape.dim.add(dim_value=size)

    def constant(self, name: str, values: Sequence[int] | int) -> None:
        """Adds an int64 constant: a list, or a scalar."""
        is_scalar = isinstance(values, int)
        numbers = [values] if isinstance(values, int) else list(values)
        self._graph.initializer.add(
            name=name, data_type=self.INT64, dims=[] if is_scalar else [len(numbers)], int64_data=numbers
        )

    def node(self, op: str, inputs: Sequence[str], output: str, **attributes: int) -> None:
        """Adds a node behind those that compute its inputs. Attributes are integers."""
        nodes = list(self._graph.node)
        position = max((place for place, node in enumerate(nodes) if set(inputs) & set(node.output)), default=-1) + 1
        new_node = self._graph.node.add(op_type=op, name=output, input=inputs, output=[output])
        for name, value in attributes.items():
            new_node.attribute.add(name=name, type=self.INT_ATTRIBUTE, i=value)
        nodes.insert(position, new_node)
        self._order(nodes)

    def remove_node(self, output: str) -> None:
        """Removes the node that computes a value."""
        self._order([each for each in self._graph.node if output not in each.output])

    def replace_input(self, value: str, other: str, readers: Sequence[Any] | None = None) -> None:
        """Replaces an input of all nodes that read it, or of `readers` alone."""
        for node in self.consumers(value) if readers is None else readers:
            for place, name in enumerate(node.input):
                if name == value:
                    node.input[place] = other

    def _order(self, nodes: Sequence[Any]) -> None:
        copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
        del self._graph.node[:]
        self._graph.node.extend(copies)
