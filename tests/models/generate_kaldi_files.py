"""Writes fixtures/kaldi_files.safetensors: files that kaldi_native_io wrote, byte by byte, and what it reads in them.

pip install kaldi_native_io==1.23.0 numpy safetensors
python tests/models/generate_kaldi_files.py
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from pathlib import Path

import kaldi_native_io as knio
import numpy as np
from safetensors.numpy import save_file

FIXTURE = Path(__file__).parent / "fixtures" / "kaldi_files.safetensors"
METHODS = ("kSpeechFeature", "kTwoByteAuto", "kOneByteAuto")


def main() -> None:
    rng = np.random.default_rng(3)
    matrix = (rng.standard_normal((37, 5)) * [1, 10, 100, 0.01, 3]).astype(np.float32)
    tensors: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/file"

        def keep(name: str, values: np.ndarray, skip: int = 0) -> None:
            tensors[f"{name}/file"] = np.frombuffer(Path(path).read_bytes()[skip:], np.uint8)
            tensors[f"{name}/values"] = np.ascontiguousarray(values)

        knio.FloatMatrix(matrix).write(path, True)
        keep("float matrix", matrix)
        knio.DoubleMatrix(matrix.astype(np.float64)).write(path, True)
        keep("double matrix", matrix.astype(np.float64))
        knio.FloatMatrix(matrix).write(path, False)
        keep("text matrix", knio.FloatMatrix.read(path).numpy().astype(np.float64))
        knio.FloatVector(matrix[:, 1]).write(path, True)
        keep("float vector", matrix[:, 1])
        for method in METHODS:
            with knio.CompressedMatrixWriter(f"ark:{path}") as writer:
                writer.write("x", matrix, getattr(knio.CompressionMethod, method))
            with knio.SequentialFloatMatrixReader(f"ark:{path}") as reader:
                values = np.array(next(iter(reader))[1])
            keep(f"compressed matrix, {method}", values, skip=len("x "))
    version = importlib.metadata.version("kaldi_native_io")
    save_file(tensors, FIXTURE, metadata={"written by": f"kaldi_native_io {version}"})


if __name__ == "__main__":
    main()
