"""Weights of ONNX graphs, dequantized, under the names that the modules had before export; and sessions for
networks that exist as a graph only.

Exporters rename matrices to numbers but keep the module path in the node that uses them; that path is read here.
8-bit matrices are scale * (value - zero_point); 8-bit convolutions, whose zero point is a float, scale * value +
zero_point.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from asr_serve.errors import WeightsCorrupt, WeightsMissing

_NODE = re.compile(r"^/(?P<module>.+)/(MatMul|Gather|Conv)(_quant)?$")
_WEIGHT_NAME = re.compile(r"^(?P<name>(?!onnx::).+\.(weight|bias))(_merged_\d+|_add_tensor)?$")


def read(path: Path) -> dict[str, np.ndarray]:
    """Returns module path -> float32 array of an .onnx or .ort file: `layers.0.mlp.fc1.weight` is (out, in). Raises
    WeightsMissing when the package that reads the file is not installed, WeightsCorrupt when it is no graph."""
    graph = _load(path)
    initializers = _initializers(graph)
    arrays: dict[str, np.ndarray] = {}
    for name, value in initializers.items():  # parameters that the exporter did not rename
        if match := _WEIGHT_NAME.match(name):
            arrays[match["name"]] = np.array(value, np.float32)
    for node in _nodes(graph):
        _take(node, initializers, arrays)
    return arrays


def constants(path: Path) -> dict[str, tuple[np.ndarray, ...]]:
    """Returns node name -> the constants among its inputs, in order, for graphs whose exporter lost other names.

    Raises as `read` does.
    """
    graph = _load(path)
    initializers = _initializers(graph)
    return {node.name: tuple(initializers[i] for i in node.input if i in initializers) for node in _nodes(graph)}


class OnnxGraph:
    """ONNX session that runs on the calling thread alone. Any number of threads may call it."""

    def __init__(self, path: Path) -> None:
        """Loads a graph. Raises WeightsMissing when the package that runs it is not installed, WeightsCorrupt."""
        try:
            import onnxruntime
        except ModuleNotFoundError as missing:
            raise _reader_missing(path, missing) from missing
        options = onnxruntime.SessionOptions()
        # torch uses the cores: no thread pool beside its own. Runs are rare: their memory is freed.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        self._session = _open(path, options)

    def __call__(self, **inputs: np.ndarray) -> np.ndarray:
        """Returns the graph's first output."""
        out: np.ndarray = self._session.run(None, inputs)[0]
        return out


def _load(path: Path) -> Any:
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ModuleNotFoundError as missing:
        raise _reader_missing(path, missing) from missing
    try:
        if path.suffix == ".ort":
            with tempfile.TemporaryDirectory() as folder:
                return onnx.load(str(_resave(path, Path(folder) / "graph.onnx"))).graph
        return onnx.load(str(path)).graph
    except DecodeError as failure:
        raise _no_graph(path) from failure


def _initializers(graph: Any) -> dict[str, np.ndarray]:
    from onnx import numpy_helper

    return {i.name: numpy_helper.to_array(i) for i in graph.initializer}


def _take(node: Any, constants: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    matrix = next((i for i in node.input if i in constants and constants[i].ndim >= 2), None)
    if matrix is None:
        return
    match = _NODE.match(node.name)
    if node.op_type == "Cast" and matrix.endswith(".weight_quantized"):  # a quantized convolution
        found[matrix.removesuffix("_quantized")] = _dequantised(matrix, constants)
    elif node.name.endswith(("/groupnorm/Mul", "/groupnorm/Add")):
        role = "weight" if node.op_type == "Mul" else "bias"
        found[f"groupnorm.{role}"] = np.asarray(constants[matrix], np.float32).reshape(-1)
    elif match and constants[matrix].ndim == 2:
        value = _dequantised(matrix, constants)
        # A Gather reads rows of an embedding; a MatMul multiplies from the right.
        key = match["module"].replace("/", ".") + ".weight"
        found.setdefault(key, np.ascontiguousarray(value if "Gather" in node.op_type else value.T))


def _dequantised(name: str, constants: dict[str, np.ndarray]) -> np.ndarray:
    value = constants[name]
    if not name.endswith("_quantized"):
        return np.array(value, np.float32)
    stem = name.removesuffix("_quantized")
    scale, zero = constants[f"{stem}_scale"].astype(np.float32), constants[f"{stem}_zero_point"]
    if zero.dtype == np.float32:
        return np.asarray(value.astype(np.float32) * scale + zero)
    return np.asarray((value.astype(np.float32) - zero.astype(np.float32)) * scale)


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _resave(path: Path, to: Path) -> Path:
    try:
        import onnxruntime
    except ModuleNotFoundError as missing:
        raise _reader_missing(path, missing) from missing
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.save_model_format", "ONNX")
    options.optimized_model_filepath = str(to)
    _open(path, options)
    return to


def _open(path: Path, options: Any) -> Any:
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except (state.Fail, state.InvalidGraph, state.InvalidProtobuf, state.InvalidArgument) as failure:
        raise _no_graph(path) from failure


def _no_graph(path: Path) -> WeightsCorrupt:
    return WeightsCorrupt(f"{path} cannot be read as a graph", "an .onnx or .ort file", "get it again")


def _reader_missing(path: Path, missing: ModuleNotFoundError) -> WeightsMissing:
    return WeightsMissing(f"{path.name} needs the Python package {missing.name}", todo="pip install onnx onnxruntime")
