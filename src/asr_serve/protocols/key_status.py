"""/v1/key and /v1/keys: what an API key may do, its limits, and how much of them is used."""

from __future__ import annotations

from typing import Literal

import msgspec


class Quota(msgspec.Struct, frozen=True):
    """Use of one limit."""

    used: int
    limit: int | None
    """None: there is no limit."""


class BatchQuotas(msgspec.Struct, frozen=True):
    """Use of the limits of files and batches."""

    bytes: Quota
    """Files and answers."""
    files: Quota
    open_batches: Quota
    """Batches that have not ended."""


class KeyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one API key. The key itself is not in it."""

    object: Literal["key"] = "key"
    name: str
    """Name in the server's logs, by the order of the configured keys: key-1, admin-1. anonymous: no key is needed, and
    all clients together have the limits of one."""
    admin: bool
    """Whether it may load and unload models, clone voices, and see evaluations and other keys."""
    concurrent: Quota
    """Requests and live sessions in work now."""
    requests_per_minute: Quota | None
    """Requests of the last minute that its rate remembers. None: they are not limited."""
    batches: BatchQuotas | None
    """None: the server keeps no files and no batches, or cannot read them now."""


class KeyList(msgspec.Struct, frozen=True):
    """All keys of a server."""

    data: list[KeyStatus]
    object: Literal["list"] = "list"


def key_status_components() -> dict[str, dict[str, object]]:
    """JSON schemas for the OpenAPI document, by name."""
    return msgspec.json.schema_components((KeyList,), ref_template="#/components/schemas/{name}")[1]
