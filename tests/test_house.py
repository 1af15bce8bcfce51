"""The house rules of docs/architecture.md, read from the sources."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "asr_serve"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)

ALL = {"Exception", "BaseException"}
BROAD_EXCEPT = {
    "engine/loop.py",
    "engine/peers/askers.py",
    "engine/peers/asking.py",
    "engine/peers/peer.py",
    "engine/process/host.py",
    "engine/process/processes.py",
    "server/layers/replies.py",
}
"""The end of an engine; one request gets an answer whatever happens; the tops of threads that speak for another
process, where whoever waits for that one must be told. A step that fails its own sessions only is an Attempt
(engine/work)."""

LEAVES = {
    # files, packets, what is written; the doctor lists its codecs
    "av": {"audio/media.py", "audio/opus.py", "audio/encode/codec.py", "cli/doctor.py"},
    "soxr": {"audio/resample.py"},
    "onnx": {"models/onnx_graph.py", "models/onnx_session.py"},  # read as weights; run as they are
    "onnxruntime": {"models/onnx_graph.py", "models/onnx_session.py"},
    # speaks; reads; and teaches
    "hibari": {"models/tts/hibari.py", "text/spoken/sounds/english.py", "train/voice/teachers.py"},
    "huggingface_hub": {"models/weights.py"},
    "tokenizers": {"text/tokens.py"},
    "jiwer": {"evaluate/wer.py"},
    "kaldifst": {"text/written/grammar.py"},  # what wetext reads its graphs with
    "whisper_normalizer": {"evaluate/wer.py"},
    "rich": {"cli/progress.py"},
    "granian": {"server/run.py"},
    "opentelemetry": {"server/telemetry/tracing.py"},
    "prometheus_client": {"metrics.py"},
    "nixl": {"transfer/nixl_agent.py"},
    "cryptography": {"engine/tiers/sealing.py"},
    "python_multipart": {"server/bodies/form.py"},
    "sounddevice": {"cli/listening/microphone.py", "cli/speaking/player.py"},  # what is heard, what is played
    "websockets": {"client/line.py"},
    "wetext": {"text/written/grammar.py"},
    "xxhash": {"transfer/checksum.py"},
    "yaml": {"models/nemo/archive.py"},
}
"""A heavy or optional package is loaded by one file."""

LONG_LINES = 400
LONG = {"models/asr/moonshine.py"}
"""Files over LONG_LINES that were looked at and are still better whole. The list should shrink."""
MODULES_IN_A_ROOM = 12


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(module: str, rooms: list[str]) -> str | None:
    """The room of a dotted module name: the deepest one that holds it, `library` for the package itself."""
    parts = module.split(".")[1:]
    for depth in range(len(parts), 0, -1):
        room = "/".join(parts[:depth])
        if room in rooms:
            return room
    return "library" if not parts else None


def the_map() -> list[str]:
    """The rooms of the map in docs/architecture.md, top to bottom."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    found = re.search(r"## The map\n.*?```text\n(.*?)```", text, re.DOTALL)
    assert found, "docs/architecture.md has no map"
    rooms: list[str] = []
    for line in found[1].splitlines():
        if line.startswith("  "):
            rooms += [name.strip("/") for name in re.split(r"\s{2,}", line.strip())[0].split()]
    return rooms


def imports(path: Path) -> Iterator[str]:
    """Dotted names a file imports, `from package import module` as the module; not those for types only."""
    for node in runtime(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{name_of(path)}: a relative import"
            assert node.level == 0, f"{name_of(path)}: a relative import"
            for alias in node.names:
                inner = PACKAGE.parent.joinpath(*node.module.split("."), alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def runtime(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from runtime(node)


def test_the_map_shows_every_room() -> None:
    folders = {p.parent.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("__init__.py")} - {"."}
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    rooms = the_map()
    assert len(rooms) == len(set(rooms))
    modules = {name_of(path).removesuffix(".py") for path in SOURCES}
    assert folders | files <= set(rooms) <= folders | modules


def test_imports_point_up_the_map() -> None:
    rooms = the_map()
    wrong = []
    for path in SOURCES:
        here = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        room = room_of(here, rooms)
        assert room, f"{name_of(path)} is in no room of the map"
        for module in imports(path):
            if module.split(".")[0] != "asr_serve":
                continue
            other = room_of(module, rooms)
            assert other, f"{name_of(path)} imports {module}, which is in no room"
            if rooms.index(other) > rooms.index(room):
                wrong.append(f"{name_of(path)} imports {module}: {other} is below {room}")
    assert not wrong, "\n".join(wrong)


def test_heavy_packages_are_loaded_by_one_leaf() -> None:
    found: dict[str, set[str]] = {package: set() for package in LEAVES}
    for path in SOURCES:
        for module in imports(path):
            if module.split(".")[0] in LEAVES:
                found[module.split(".")[0]].add(name_of(path))
    assert found == LEAVES


def test_the_command_line_starts_without_torch() -> None:
    script = "import sys, asr_serve, asr_serve.cli; sys.exit('torch' in sys.modules)"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=environ, check=False).returncode == 0


def test_broad_except_lives_in_the_loop() -> None:
    broad = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"all"}
                if caught & {"all", "Exception", "BaseException"}:
                    broad.add(name_of(path))
    assert broad == BROAD_EXCEPT


def test_only_config_reads_the_environment() -> None:
    readers = {name_of(p) for p in SOURCES if re.search(r"\bos\.(environ|getenv)\b", p.read_text())}
    assert readers == {"config.py"}


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name == "__init__.py"], ids=name_of)
def test_all_is_exactly_the_public_names(path: Path) -> None:
    listed: list[str] = []
    public: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                listed = ast.literal_eval(value)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                public.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                public.add(name)
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("asr_serve"):
                public.update(alias.asname or alias.name for alias in names)
    if not listed and path.parent != PACKAGE:
        return  # a room that offers its modules, not names
    # The version is public by custom, whatever its underscores say.
    assert set(listed) == {n for n in public if not n.startswith("_")} | (public & {"__version__"})


def test_one_version() -> None:
    import asr_serve

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert asr_serve.__version__ == project["version"]
    assert sorted(asr_serve.__all__) == ["DEFAULT_MODEL", "__version__", "load"]


def test_rooms_are_small_and_files_are_nouns() -> None:
    crowded, vague = [], []
    for folder in {path.parent for path in SOURCES}:
        modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        vague += [name for name in modules if name in ("utils.py", "common.py", "helpers.py", "misc.py")]
        if len(modules) > MODULES_IN_A_ROOM and folder.parent.name != "models":
            crowded.append(f"{name_of(folder)}: {len(modules)} files")
    assert not vague
    assert not crowded


def test_files_fit_in_the_head() -> None:
    long = {name_of(path) for path in SOURCES if len(path.read_text().splitlines()) > LONG_LINES}
    assert long <= LONG, f"split these by noun, or say why not in LONG: {sorted(long - LONG)}"


def committed() -> list[Path]:
    """Text files that are, or would be, committed."""
    asked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=False
    )
    if asked.returncode:
        pytest.skip("not a git checkout: no telling which files are committed")
    paths = [ROOT / os.fsdecode(name) for name in asked.stdout.split(b"\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:8_192]]


def test_every_test_file_has_a_name_of_its_own() -> None:
    """pytest imports them by their names alone: two of one name fail where they meet, and not before."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    # In pieces, so that this file does not find itself.
    telling = ["/" + "work/", "work/" + "shared", "/" + "root/", "/opt/" + "wheels", "/opt/" + "pypi"]
    telling += ["pypi" + ".org", "python" + "hosted.org", "download." + "pytorch.org"]
    found = []
    for path in committed():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            found += [f"{path.relative_to(ROOT)}:{number}: {word}" for word in telling if word in line]
            if re.search(r"(?<![\w.~])/home/\w", line):
                found.append(f"{path.relative_to(ROOT)}:{number}: a home folder")
    assert not found, "\n".join(found)


def test_the_pins_are_plain_versions_of_what_the_project_asks_for() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line) for line in lines), lines
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        asked += extra
    names = {re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", line)[0]).lower() for line in asked}
    assert names - {"asr-serve"} <= pinned
