"""`asr-serve doctor`: this machine, what will be used and why, what is missing and how to get it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from asr_serve import DEFAULT_MODEL
from asr_serve.api.cli.exit_codes import FAILED, exit_on_error
from asr_serve.api.cli.models import as_text, ways_to_get
from asr_serve.api.cli.options import AsJson, Device, Dtype
from asr_serve.cores import usable_cores
from asr_serve.errors import AsrServeError, OptionError

if TYPE_CHECKING:
    from asr_serve.devices import interface

X86_FLAGS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
ARM_FLAGS = ("asimd", "asimddp", "i8mm", "bf16", "sve")
CODECS = ("pcm_s16le", "flac", "mp3", "aac", "vorbis", "opus", "alac", "amrnb", "wmav2")
NATIVE = {
    "_core": "the kernels (slower ones in torch stand in for them)",
    "_ring": "the ring between server and engine (a slower one in Python stands in for it)",
    "_search": "the search of CTC models (a slower one in Python stands in for it)",
    "_wfst": "the search of decoding graphs (a slower one in Python stands in for it)",
    "_align": "forced alignment to CTC models (a slower one in numpy stands in for it)",
    "_dtw": "the times of words (a slower one in numpy stands in for it)",
    "_disk": "the disk by io_uring (threads in Python stand in for it)",
    "_copy": "copies of much at once to another process (numpy stands in for it)",
    "_packets": "the receiver of RTP packets (a slower one in Python stands in for it)",
}
"""Descriptions of the compiled modules."""
PACKAGES = ("torch", "numpy", "av", "soxr", "safetensors", "tokenizers", "huggingface_hub", "onnxruntime")


class MissingDependency(msgspec.Struct, frozen=True):
    """Missing dependency, and the command that installs it. `needed`: nothing works without it."""

    missing: str
    command: str
    needed: bool = False


class DoctorReport(msgspec.Struct):
    """Findings; a part is None or empty where it could not be inspected, and `missing` gives the reason."""

    machine: dict[str, object]
    packages: dict[str, str | None]
    device: dict[str, object] | None
    cuda: list[str]
    native: dict[str, bool]
    """Whether each compiled module was built."""
    codecs: dict[str, bool]
    models: dict[str, str | None]
    missing: list[MissingDependency]


@exit_on_error
def doctor(
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Annotated[str, typer.Option(help="8-bit quantization: auto, none, int8 or dynamic.")] = "auto",
    edge: Annotated[
        bool, typer.Option("--edge", help="Show instead what this host allows `asr-serve edge`, and what mends it.")
    ] = False,
    interface: Annotated[
        str | None, typer.Option(metavar="NAME", help="Network interface that --edge looks at.", show_default="all")
    ] = None,
    host: Annotated[
        bool,
        typer.Option("--host", help="Show instead whether this host is as a deployment wants it, and what mends it."),
    ] = False,
    expect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Requirement for --host, like huge_pages=1024; names and defaults are those of deploy/terraform/aws. "
            "May be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show this machine, the device and data type that will be used, and what is missing, with commands to install it.

    Exit code 1 when something is missing that transcription needs. With --edge:
    when this host does not allow AF_XDP, which is faster than recvmmsg. With
    --host: when something is not as it is wanted.

    \b
    Examples
      asr-serve doctor
      asr-serve doctor --device cuda
      asr-serve doctor --quantize dynamic
      asr-serve doctor --json > machine.json
      asr-serve doctor --edge --interface eth0
      asr-serve doctor --host --expect huge_pages=1024
    """
    if host and edge:
        raise OptionError("--host and --edge", "one of the two: they are reports of their own")
    if expect and not host:
        raise OptionError("--expect without --host", "it is of the report about the host", "add --host")
    if edge:
        from asr_serve.edge.xdp import host_checks

        report = host_checks.inspect_host(interface)
        print(as_text(report) if as_json else host_checks.format_host(report), end="\n" if as_json else "")
        return 0 if report.driver == "af_xdp" else FAILED
    if host and interface is None:
        from asr_serve.api.cli.host import check_host, format_host_report, parse_expectations

        findings = check_host(parse_expectations(expect or ()))
        print(as_text(findings) if as_json else format_host_report(findings), end="\n" if as_json else "")
        return 0 if findings.fits else FAILED
    if interface is not None:
        raise OptionError("--interface without --edge", "it is of the report about the edge", "add --edge")
    machine_report = inspect_machine(device, dtype, quantize)
    print(as_text(machine_report) if as_json else format_report(machine_report), end="\n" if as_json else "")
    return FAILED if any(finding.needed for finding in machine_report.missing) else 0


def inspect_machine(device: str = "auto", dtype: str = "auto", quantize: str = "auto") -> DoctorReport:
    """Inspects everything. Raises OptionError for a device, dtype or quantization that does not exist here."""
    missing: list[MissingDependency] = []
    packages = {name: installed(name) for name in PACKAGES}
    for name in PACKAGES:
        if packages[name] is None and name != "onnxruntime":
            missing.append(MissingDependency(f"the package {name}", f"pip install {name}", needed=True))
    native = native_modules()
    for name in NATIVE:
        if not native[name]:
            missing.append(MissingDependency(f"native {NATIVE[name]}", "install a C++ compiler, then: make setup"))
    usable = packages["torch"] is not None
    return DoctorReport(
        machine=machine(),
        packages=packages,
        device=chosen_device(device, dtype, quantize) if usable else None,
        cuda=cuda_devices() if usable else [],
        native=native,
        codecs=codecs(missing) if packages["av"] else {},
        models=models(missing) if usable else {},
        missing=missing,
    )


def machine() -> dict[str, object]:
    """Returns the machine's properties, as this process sees them."""
    cpu = cpu_fields()
    cores = os.cpu_count() or 1
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": cpu.get("model name") or platform.processor() or "unknown",
        "cores": cores,
        "cores_allowed": usable_cores(),
        "memory_bytes": memory_bytes(),
        "isa": [flag for flag in (*X86_FLAGS, *ARM_FLAGS) if flag in flags],
    }


def cpu_fields(source: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Returns the fields of the first processor; empty where the system has no such file."""
    try:
        first = source.read_text().split("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def installed(package: str) -> str | None:
    """Returns a package's version; None if it is not installed."""
    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:
        return None


def native_modules() -> dict[str, bool]:
    """Returns whether each module was built. Searched for, not imported: ASR_SERVE_NATIVE=0 hides none."""
    spec = importlib.util.find_spec("asr_serve")
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    names = [path.name for folder in folders for path in Path(folder, "kernels").glob("*")]
    built = {file.partition(".")[0] for file in names if file.endswith(suffixes)}
    return {name: name in built for name in NATIVE}


def chosen_device(device: str, dtype: str, quantize: str) -> dict[str, object]:
    """Describes the device that is chosen, for `auto` as well, and what `quantize=auto` does on it."""
    from asr_serve.devices import make_device
    from asr_serve.types import Int8Calibration

    resolved = make_device(device, dtype, quantize, calibration=Int8Calibration())
    details = {"device": resolved.name, "dtype": resolved.dtype_name, "threads": resolved.threads}
    details |= {name: value if is_plain(value) else str(value) for name, value in resolved.describe().items()}
    if quantize == "auto":
        details["quantize_auto"] = quantize_auto(resolved, dtype)
    return details


def quantize_auto(device: interface.Device, dtype: str) -> str:
    """Describes what `quantize=auto` does on a device that was made with it and with the setting `dtype`."""
    from asr_serve.devices.cpu import CROSS_KV, CpuDevice
    from asr_serve.devices.int8 import has_dots
    from asr_serve.models.registry import asr_cards

    if not isinstance(device, CpuDevice):
        return f"none: 8-bit layers are chosen on a CPU, and this is {device.name}"
    if dtype != "auto":
        return "none: a dtype was chosen"
    if not has_dots(device.kernels):
        return "none: there are no 8-bit instructions here"
    if device.quantize == "none":
        return f"none: matrices of {device.dtype_name} are faster here"
    models = []
    for card in asr_cards().values():
        if card.int8 is not None:
            cross_kv = " (keys and values of cross-attention too)" if card.int8.quantizes(CROSS_KV) else ""
            models.append(f"{card.name}{cross_kv}")
    return f"8-bit layers, which are faster than {device.dtype_name} here, in {', '.join(models)}"


def is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def cuda_devices() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def codecs(missing: list[MissingDependency]) -> dict[str, bool]:
    """Returns whether the media library decodes each of the usual codecs."""
    import av

    known = {name: name in av.codecs_available for name in CODECS}
    if absent := [name for name, works in known.items() if not works]:
        missing.append(MissingDependency(f"decoders in PyAV: {', '.join(absent)}", "pip install --force-reinstall av"))
    return known


def models(missing: list[MissingDependency]) -> dict[str, str | None]:
    """Maps model names to the folders of their weights, None if not here. Only the default model is ever missing."""
    from asr_serve.models.checkpoints.store import locate
    from asr_serve.models.registry import all_cards

    folders = {}
    for card in all_cards().values():
        try:
            folder = locate(card)
        except AsrServeError:
            folder = None
        folders[card.name] = None if folder is None else str(folder)
        if folder is None and card.name == DEFAULT_MODEL:
            missing.append(MissingDependency(f"the weights of {card.name}", ways_to_get(card)[0], needed=True))
    return folders


def model_line(name: str, folder: str | None) -> str:
    """Returns a model's folder, or the command that gets its weights: most machines have few models."""
    if folder is None:
        from asr_serve.models.registry import any_card

        folder = f"not fetched; {ways_to_get(any_card(name))[0]}"
    return f"  {name:33} {folder}"


def format_report(report: DoctorReport) -> str:
    """Formats the report as text."""
    m = report.machine
    memory = m["memory_bytes"]
    isa = m["isa"]
    assert isinstance(isa, list)
    lines = [
        "machine",
        f"  system   {m['system']}, Python {m['python']}",
        f"  cpu      {m['cpu']}, {m['cores_allowed']} of {m['cores']} cores allowed",
        f"  isa      {' '.join(isa) or 'nothing of note'}",
        f"  memory   {f'{memory / (1 << 30):.1f} GiB' if isinstance(memory, int) else 'unknown'}",
        f"  cuda     {', '.join(report.cuda) or 'no device that torch sees'}",
        "runs with",
    ]
    native = [name if built else f"{name} not built" for name, built in report.native.items()]
    runs_with = {**(report.device or {}), "native": ", ".join(native)}
    lines += [f"  {name.replace('_', ' '):12} {value}" for name, value in runs_with.items()]
    lines += ["packages", *(f"  {name:16} {found or 'not installed'}" for name, found in report.packages.items())]
    lines += ["codecs", f"  {' '.join(name for name, works in report.codecs.items() if works) or 'none'}"]
    lines += ["models", *(model_line(name, folder) for name, folder in report.models.items())]
    if report.missing:
        lines.append("missing")
        for finding in report.missing:
            lines.append(f"  {finding.missing}{'  (needed)' if finding.needed else ''}")
            lines.append(f"    {finding.command}")
    else:
        lines.append("nothing is missing")
    return "".join(f"{line}\n" for line in lines)
