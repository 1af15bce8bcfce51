"""Loads what needs the extra `riva`: grpcio and protobuf."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from asr_serve.errors import ProgramMissing


class RivaPackages(NamedTuple):
    """Modules that need the extra `riva`."""

    grpc_server: ModuleType
    endpoints: ModuleType


def load_riva() -> RivaPackages:
    """Raises ProgramMissing."""
    try:
        from asr_serve.server.realtime.riva import endpoints, grpc_server
    except ImportError as error:
        raise ProgramMissing(
            f"{error.name or 'grpcio'} is not installed", "riva_port needs it", "pip install 'asr-serve[riva]'"
        ) from error
    return RivaPackages(grpc_server, endpoints)
