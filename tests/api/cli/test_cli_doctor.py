from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asr_serve.api.cli import app, doctor
from asr_serve.models.checkpoints import store


def test_doctor_as_json_tells_what_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "locate", lambda card: Path("/weights") / card.name)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert report["machine"]["cores_allowed"] >= 1
    assert report["machine"]["memory_bytes"] > 1 << 20
    assert report["packages"]["torch"]
    assert report["device"]["dtype"] in ("fp32", "bf16")
    assert report["device"]["threads"] >= 1
    assert report["device"]["quantize_auto"], "the default of the engine, and of this command"
    assert report["codecs"]["flac"] is True
    assert report["models"]["moonshine-tiny-en"] == "/weights/moonshine-tiny-en"
    assert report["models"]["smart-turn"] == "/weights/smart-turn"


def test_missing_parts_are_reported_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "locate", lambda card: None)
    built = dict.fromkeys(doctor.NATIVE, True) | {"_search": False}
    monkeypatch.setattr(doctor, "native_modules", lambda: built)
    result = CliRunner().invoke(app, ["doctor"])
    page = result.stdout
    assert "the weights of moonshine-tiny-en  (needed)\n    pip install moonshine-voice==0.1.0\n" in page
    assert page.count("the weights of") == 1, "a model that nobody asked for is no fault"
    assert re.search(r"^  whisper-tiny +not fetched; asr-serve models fetch whisper-tiny$", page, re.MULTILINE)
    assert "native the search of CTC models (a slower one in Python stands in for it)\n    install a C++" in page
    assert "native the kernels" not in page
    assert "_core, _ring, _search not built, _wfst, _align, _dtw, _disk, _copy" in page
    assert page.count("make setup") == 1
    assert result.exit_code == 1


def test_every_native_module_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = (Path(doctor.__file__).parents[2] / "kernels" / "CMakeLists.txt").read_text()
    assert re.findall(r"^nanobind_add_module\((\w+)", recipe, re.MULTILINE) == list(doctor.NATIVE)
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    folder = tmp_path / "kernels"
    folder.mkdir()
    package = importlib.machinery.ModuleSpec("asr_serve", None, is_package=True)
    package.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package)
    assert not any(doctor.native_modules().values())
    for name, built in ((f"_ring{suffix}", "_ring"), ("_search.so.old", None), (f"_core{suffix}", "_core")):
        (folder / name).touch()
        assert built is None or doctor.native_modules()[built]
    assert [name for name, built in doctor.native_modules().items() if built] == ["_core", "_ring"]


def test_without_torch_the_doctor_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "torch" else real(name))
    report = doctor.inspect_machine()
    assert (report.device, report.models) == (None, {})
    assert any(finding.command == "pip install torch" and finding.needed for finding in report.missing)
    assert "pip install torch" in doctor.format_report(report)


@pytest.mark.parametrize(
    ("dtype", "native", "does"),
    [
        ("auto", "0", "none: there are no 8-bit instructions here"),
        ("bf16", "1", "none: a dtype was chosen"),
        ("auto", "1", "8-bit layers, which are faster than {}"),
    ],
)
def test_it_tells_what_auto_does(dtype: str, native: str, does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_SERVE_NATIVE", native)
    device = doctor.chosen_device("cpu", dtype, "auto")
    if does.startswith("8-bit") and device["quantize"] == "none":
        pytest.skip("this CPU, or what was compiled for it, has no fast 8-bit products")
    assert str(device["quantize_auto"]).startswith(does.format(device["dtype"]))
    in_model = "moonshine-tiny-en (keys and values of cross-attention too)"
    assert (in_model in str(device["quantize_auto"])) == (device["quantize"] == "auto")
    assert "cross_kv" not in device, "it is of a model"
    assert "quantize_auto" not in doctor.chosen_device("cpu", dtype, "none")


def test_a_device_that_does_not_exist_is_wrong_usage() -> None:
    result = CliRunner().invoke(app, ["doctor", "--device", "gpu"])
    assert result.stderr.startswith("error: ")
    assert result.exit_code == 2


def test_cpu_fields_read_the_first_processor(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: A CPU: 2\nflags\t: avx2 amx_bf16\n\nprocessor\t: 1\nflags\t: x\n")
    assert doctor.cpu_fields(info) == {"processor": "0", "model name": "A CPU: 2", "flags": "avx2 amx_bf16"}
    assert doctor.cpu_fields(tmp_path / "none") == {}
