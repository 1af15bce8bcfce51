"""Machines of their own, and Redis on one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hosts import Network
from redis_server import RedisServer


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.fixture(scope="module")
def redis(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    host = network.add("redis")
    server = RedisServer(tmp_path_factory.mktemp("redis"), host.address, host.within)
    yield server
    server.close()
