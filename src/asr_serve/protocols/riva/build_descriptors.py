"""Builds descriptors.binpb, the compiled .proto files: python -m asr_serve.protocols.riva.build_descriptors. It needs
grpcio-tools."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

from asr_serve.protocols.riva.methods import DESCRIPTORS

PROTOS = DESCRIPTORS.parent / "proto"


def build(to: Path) -> None:
    """Writes the FileDescriptorSet of all .proto files. Raises SystemExit where one cannot be compiled."""
    names = sorted(path.name for path in PROTOS.glob("*.proto"))
    if protoc.main(["protoc", f"-I{PROTOS}", f"--descriptor_set_out={to}", "--include_imports", *names]):
        sys.exit("a .proto file cannot be compiled: see above")


if __name__ == "__main__":
    build(DESCRIPTORS)
