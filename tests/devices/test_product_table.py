"""Measured products outlive the process, for one machine, and a damaged file costs a measurement and nothing else."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import msgspec
import pytest

from asr_serve.devices import product_table
from asr_serve.devices.product_table import FORMAT, MAX_MACHINES, MAX_PRODUCTS, ProductFile, ProductTable, machine_key


def measured_as(gain: float, calls: list[float]) -> object:
    def measure() -> float:
        calls.append(gain)
        return gain

    return measure


def test_a_product_is_measured_once_on_a_machine(tmp_path: Path) -> None:
    path, calls = tmp_path / "new" / "products.json", []
    table = ProductTable("here", path)
    for _ in range(2):
        assert table.gain("64x96", measured_as(1.75, calls)) == 1.75  # type: ignore[arg-type]
    assert ProductTable("here", path).gain("64x96", measured_as(9.0, calls)) == 1.75  # type: ignore[arg-type]
    assert calls == [1.75]
    assert ProductTable("elsewhere", path).gain("64x96", measured_as(1.25, calls)) == 1.25  # type: ignore[arg-type]
    assert ProductTable("here", path).gain("64x96", measured_as(9.0, calls)) == 1.75  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b'{"format": 1, "machines": {"here": {"64x96": -1}}}',
        b'{"format": 1, "machines": {"here": {"64x96": "fast"}}}',
        b'{"format": 1, "machines": [], "more": 1}',
        msgspec.json.encode(ProductFile(FORMAT + 1, {"here": {"64x96": 9.0}})),
    ],
)
def test_a_file_of_something_else_is_measured_anew_and_replaced(tmp_path: Path, content: bytes) -> None:
    path, calls = tmp_path / "products.json", []
    path.write_bytes(content)
    assert ProductTable("here", path).gain("64x96", measured_as(1.5, calls)) == 1.5  # type: ignore[arg-type]
    assert ProductTable("here", path).gain("64x96", measured_as(9.0, calls)) == 1.5  # type: ignore[arg-type]
    assert calls == [1.5]


def test_a_file_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    calls: list[float] = []
    table = ProductTable("here", in_the_way / "products.json")
    for _ in range(2):
        assert table.gain("64x96", measured_as(1.5, calls)) == 1.5  # type: ignore[arg-type]
    assert calls == [1.5], "known in this process"
    assert in_the_way.read_text() == ""


def test_two_processes_that_add_to_it_keep_each_others_products(tmp_path: Path) -> None:
    path = tmp_path / "products.json"
    first, second = ProductTable("here", path), ProductTable("here", path)
    first.gain("64x96", lambda: 1.5)
    second.gain("96x64", lambda: 2.5)
    assert msgspec.json.decode(path.read_bytes(), type=ProductFile).machines == {"here": {"64x96": 1.5, "96x64": 2.5}}
    assert [each.name for each in tmp_path.iterdir()] == ["products.json"], "no part of a file is left"


def test_the_file_is_bounded_and_the_oldest_go_first(tmp_path: Path) -> None:
    path = tmp_path / "products.json"
    full = {f"machine {n}": {"64x96": 1.0} for n in range(MAX_MACHINES)}
    full["machine 0"] = {f"product {n}": 1.0 for n in range(MAX_PRODUCTS)}
    path.write_bytes(msgspec.json.encode(ProductFile(FORMAT, full)))
    ProductTable("machine 0", path).gain("new", lambda: 2.0)
    ProductTable("another", path).gain("new", lambda: 2.0)
    machines = msgspec.json.decode(path.read_bytes(), type=ProductFile).machines
    assert len(machines) == MAX_MACHINES
    assert len(machines["machine 0"]) == MAX_PRODUCTS
    assert machines["machine 0"]["new"] == 2.0
    assert "product 0" not in machines["machine 0"]
    assert "machine 1" not in machines, "machine 0 was used later"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """File of compiled kernels."""
    path = tmp_path / "_core.so"
    path.write_bytes(b"multiply")
    return path


def test_another_processor_or_version_is_another_machine(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine_key(library, "avx512", "avx512_vnni")
    assert here == machine_key(library, "avx512", "avx512_vnni")
    assert here != machine_key(library, "avx512", "avx512")
    monkeypatch.setattr(product_table.torch, "__version__", "9.9")
    assert here != machine_key(library, "avx512", "avx512_vnni")
    monkeypatch.undo()
    monkeypatch.setattr(product_table, "cpu_fields", lambda: {"model name": "another"})
    assert here != machine_key(library, "avx512", "avx512_vnni")


def test_kernels_that_were_built_anew_are_measured_anew(library: Path, tmp_path: Path) -> None:
    """Between releases the version of the package stays the same."""
    here, stat = machine_key(library), library.stat()
    same = tmp_path / "elsewhere.so"
    same.write_bytes(library.read_bytes())
    assert machine_key(same) == here
    library.write_bytes(b"MULTIPLY")
    os.utime(library, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert machine_key(library) != here


def test_it_is_known_without_the_metadata_of_an_installed_package(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the package is run from its sources."""

    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    here = machine_key(library)
    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    assert machine_key(library) == here
