"""Builds descriptors.binpb, the compiled .proto files: python -m asr_serve.protocols.riva.build_descriptors. It needs
grpcio-tools."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from asr_serve.protocols.riva.methods import DESCRIPTORS

PROTOS = DESCRIPTORS.parent / "proto"
COMPILE_S = 60
"""Longest time for the compiler."""


def build(to: Path) -> None:
    """Writes the FileDescriptorSet of all .proto files. Raises CalledProcessError where one cannot be compiled; the
    compiler tells the reason on standard error. Raises TimeoutExpired where it takes longer than COMPILE_S."""
    names = sorted(path.name for path in PROTOS.glob("*.proto"))
    # A process of its own: the compiler brings a libprotobuf, which crashes where another library has brought one.
    compiler = [sys.executable, "-m", "grpc_tools.protoc"]
    arguments = [f"-I{PROTOS}", f"--descriptor_set_out={to}", "--include_imports", *names]
    subprocess.run([*compiler, *arguments], check=True, timeout=COMPILE_S)


if __name__ == "__main__":
    build(DESCRIPTORS)
