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
SRC = ROOT / "src"
PACKAGE, TOOLS = SRC / "asr_serve", SRC / "asr_serve_tools"
SOURCES = sorted(path for package in (PACKAGE, TOOLS) for path in package.rglob("*.py"))

BROAD_EXCEPT = {
    "cluster/control.py",
    "engine/process/local_offer.py",  # closes a file, and raises on
    "server/engine_registry.py",  # gives up a lock, and raises on
    "edge/local_engine.py",  # a thread that connects for all sessions: without an answer they would wait for ever
    "edge/gate_worker.py",  # the thread that gates for all sessions
    "edge/edge_service.py",  # the thread that receives for all sessions
    "edge/engine_transport.py",  # a session's error is that session's
    "edge/telephone.py",  # events of all calls
    "engine/loop.py",
    "engine/remote/encode_client.py",
    "engine/remote/peer_pool.py",
    "engine/remote/connection.py",
    "engine/process/server_link.py",
    "engine/process/supervisor.py",
    "engine/replicas/backend.py",
    "engine/vllm/worker_main.py",
    "server/batch/batch_queue.py",  # a line's error is that line's, and a batch's is that batch's
    "server/middleware/error_handlers.py",
    "server/realtime/stream/session_manager.py",  # a claimed session that cannot go on here is given back
    "server/realtime/webrtc/call.py",  # one call fails alone
    "server/shadow_transcriber.py",  # one upload fails alone
    "server/server_sent_events.py",
    "server/sessions/writer.py",  # a session's error is that session's
    "server/transcription_job.py",
    "server/run.py",
    "models/registry.py",
    "pipelines/stages/staged_recognizer.py",
}
"""The engine's loop, the middleware that answers every request, and the tops of the threads that speak for another
process. A step that fails its own requests only is guarded by StepGuard (engine/executor.py)."""

LEAVES = {
    "aioice": {"server/realtime/webrtc/ice_lite.py"},
    "aiortc": {"server/realtime/webrtc/media_peer.py"},
    # files, packets, what is written; the doctor lists its codecs
    "av": {
        *("audio/media_reader.py", "audio/opus_decoder.py", "audio/g722_decoder.py"),
        *("audio/encode/packet_encoder.py", "api/cli/doctor.py"),
        "server/realtime/webrtc/media_peer.py",  # frames, as aiortc takes them
    },
    "soxr": {"audio/resample.py"},
    "onnx": {
        "models/checkpoints/onnx_graph.py",
        "models/checkpoints/onnx_session.py",
    },  # read as weights; run as they are
    "onnxruntime": {"models/checkpoints/onnx_graph.py", "models/checkpoints/onnx_session.py"},
    # speaks; reads; and teaches
    "h2": {"api/client/http2_connection.py"},
    "hibari": {"models/tts/hibari.py", "text/hibari_english.py", "asr_serve_tools/train/voice/teacher_voices.py"},
    "huggingface_hub": {"models/checkpoints/store.py"},
    "tokenizers": {"text/tokenizers.py", "models/checkpoints/gguf_causal_lm.py"},  # read; and written
    "jiwer": {"asr_serve_tools/evaluate/wer.py"},
    # what wetext reads its graphs with; graphs that are built
    "faster_whisper": {"asr_serve_tools/evaluate/evaluated_systems.py"},
    "kaldifst": {"text/normalization/wetext_grammar.py", "decoding/wfst/graph_builder.py"},
    "whisper_normalizer": {"asr_serve_tools/evaluate/wer.py"},
    "rich": {"api/cli/progress.py"},
    # its messages; what ONNX's reader raises
    "google": {
        "protocols/riva/message_classes.py",
        "models/checkpoints/onnx_graph.py",
        "models/checkpoints/onnx_session.py",
    },
    "grpc": {"server/realtime/riva/grpc_server.py"},
    "granian": {"server/run.py", "edge/run.py"},
    "opentelemetry": {"server/telemetry/tracing.py"},
    "prometheus_client": {"metrics.py"},
    "nixl": {"transfer/nixl_agent.py"},
    "cryptography": {"engine/cache/integrity.py", "server/sessions/cipher.py"},  # offloaded states; stored sessions
    "redis": {"server/sessions/redis_store.py"},
    "pylibsrtp": {"edge/srtp.py"},
    "python_multipart": {"server/uploads/multipart_form.py"},
    # one package of Ray's own: the application, its replicas, the router, control
    "ray": {
        f"cluster/{name}.py"
        for name in (
            "__init__",
            "application",
            "attachments",
            "autoscaling_policy",
            "control",
            "engine_replica",
            "ingress",
            "request_router",
        )
    },
    "sounddevice": {"api/cli/io/microphone.py", "api/cli/io/loudspeaker.py"},  # what is heard, what is played
    "transformers": {"decoding/language_model/causal_scorer.py"},
    "vosk": {"asr_serve_tools/evaluate/evaluated_systems.py"},
    "vllm": {"engine/vllm/worker_main.py"},
    "wasmtime": {"edge/voice_activity.py"},
    "websockets": {"api/client/connection.py", "api/client/async_connection.py"},  # for threads; for one loop
    "wetext": {"text/normalization/wetext_grammar.py"},
    "xxhash": {"transfer/checksum.py"},
    "yaml": {"models/asr/nemo/archive.py", "cluster/cluster_config.py"},  # archives of NeMo; cluster files
}
"""A heavy or optional package is loaded by one file."""

MODEL_FILE_NAMES = {"Config", "Model"}
"""Every model file defines these two (models/registry.py), so they repeat within models/."""

DYNAMIC_ATTRIBUTES = {
    ("engine/process/messages.py", "getattr(error, 'retry_after_ms', 0)"),  # errors of one kind have it
    ("engine/process/messages.py", "getattr(errors, self.kind)"),  # an error's class by the name that was sent
    ("engine/remote/handshake.py", "getattr(client, name)"),  # each field of two records is compared
    ("engine/remote/handshake.py", "getattr(worker, name)"),
    ("engine/seq2seq/decode_batch.py", "getattr(options, name)"),  # each field of a request's options
    ("engine/seq2seq/decode_batch.py", "getattr(NO_OPTIONS, name)"),
    ("engine/tts/request.py", "getattr(stretch, name)"),  # each field of a phoneme span
}
"""Attributes that the engine and searches read by a name that is data. None of them is a model's: what a model can
do is a field of models/interfaces.py."""

UNTYPED_NAMES = {
    # objects of an optional library that has no types
    ("decoding/language_model/causal_scorer.py", "model"),
    ("decoding/language_model/causal_scorer.py", "self._tokenizer"),
    ("engine/vllm/worker_main.py", "logits"),  # torch is not imported with the file
    ("engine/vllm/worker_main.py", "params"),
    ("engine/builder.py", "options"),  # keyword arguments handed on
    ("engine/streaming/incremental_encoder.py", "offload"),
    ("engine/process/in_flight.py", "value"),  # a future's result, whatever was asked
    ("engine/request.py", "value"),
    ("engine/streaming/executor.py", "result"),
}
"""Parameters and fields of the engine and of searches whose type is Any. None of them holds a model."""


def name_of(path: Path) -> str:
    """A file's path as the map writes it: relative to src/asr_serve, or to src where it is one of the tools."""
    return path.relative_to(PACKAGE if PACKAGE in path.parents else SRC).as_posix()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def package_of(module: str, packages: list[str]) -> str | None:
    """The map's entry for a dotted module name: the longest that holds it. `asr_serve` itself belongs to api."""
    parts = module.split(".")
    parts = (parts[1:] or ["api"]) if parts[0] == "asr_serve" else parts
    names = ("/".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((name for name in names if name in packages), None)


def the_map() -> list[str]:
    """The packages of the map in docs/architecture.md, top to bottom."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    found = re.search(r"## The map\n.*?```text\n(.*?)```", text, re.DOTALL)
    assert found, "docs/architecture.md has no map"
    packages: list[str] = []
    for line in found[1].splitlines():
        if line.startswith("  "):
            packages += [name.strip("/") for name in re.split(r"\s{2,}", line.strip())[0].split()]
    return packages


def imports(path: Path) -> Iterator[str]:
    """Dotted names a file imports, those under TYPE_CHECKING too; `from package import module` as the module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{name_of(path)}: a relative import"
            assert node.level == 0, f"{name_of(path)}: a relative import"
            for alias in node.names:
                inner = SRC.joinpath(*node.module.split("."), alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def test_the_map_names_every_package() -> None:
    """Folders of the first two levels stand on the map; deeper ones belong to the folder above them."""
    folders = {name_of(path.parent) for path in SOURCES if path.name == "__init__.py" and path.parent != PACKAGE}
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    packages = the_map()
    assert len(packages) == len(set(packages))
    modules = {name_of(path).removesuffix(".py") for path in SOURCES}
    assert {name for name in folders if name.count("/") < 2} | files <= set(packages) <= folders | modules


def test_imports_follow_the_order_of_the_map() -> None:
    packages = the_map()
    wrong = []
    for path in SOURCES:
        here = module_of(path)
        package = package_of(here, packages)
        assert package, f"{name_of(path)} is in no package of the map"
        for module in imports(path):
            if module.split(".")[0] not in (PACKAGE.name, TOOLS.name):
                continue
            other = package_of(module, packages)
            assert other, f"{name_of(path)} imports {module}, which is in no package of the map"
            if packages.index(other) > packages.index(package):
                wrong.append(f"{name_of(path)} imports {module}: {other} is below {package}")
    assert not wrong, "\n".join(wrong)


def test_the_product_does_not_import_its_tools() -> None:
    """Training, labelling and evaluation need the product, which runs without them."""
    product = [path for path in SOURCES if PACKAGE in path.parents]
    assert [name_of(path) for path in product if any(m.split(".")[0] == TOOLS.name for m in imports(path))] == []


def test_public_class_names_are_unique() -> None:
    found: dict[str, int] = {}
    for path in SOURCES:
        shared = MODEL_FILE_NAMES if name_of(path).startswith("models/") else set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in shared:
                found[node.name] = found.get(node.name, 0) + 1
    repeated = {name: count for name, count in found.items() if count > 1}
    assert not repeated, f"these class names need a word more: {repeated}"


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    """Paths in a page are relative to src/asr_serve, src or the repository."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    named = set(re.findall(r"`([\w.-]+(?:/[\w.-]+)+\.py)`", text))
    bases = (PACKAGE, SRC, ROOT)
    assert sorted(name for name in named if not any((base / name).is_file() for base in bases)) == []


def test_classes_that_the_architecture_names_exist() -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / "architecture.md").read_text(), flags=re.DOTALL)
    named = set(re.findall(r"`([A-Z][a-z]\w*[A-Z]\w*)`", text))
    defined = {name for path in SOURCES for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)}
    assert sorted(named - defined) == []


def test_heavy_packages_are_loaded_by_one_leaf() -> None:
    found: dict[str, set[str]] = {package: set() for package in LEAVES}
    for path in SOURCES:
        for module in imports(path):
            if module.split(".")[0] in LEAVES:
                found[module.split(".")[0]].add(name_of(path))
    assert found == LEAVES


def test_the_command_line_starts_without_torch() -> None:
    script = "import sys, asr_serve, asr_serve.api.cli; sys.exit('torch' in sys.modules)"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=environ, check=False).returncode == 0


def test_broad_except_stands_where_it_may() -> None:
    broad = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"all"}
                if caught & {"all", "Exception", "BaseException"}:
                    broad.add(name_of(path))
    assert broad == BROAD_EXCEPT


def test_the_engine_asks_models_for_nothing_but_their_contract() -> None:
    dynamic, untyped = set(), set()
    for path in (path for path in SOURCES if name_of(path).startswith(("engine/", "decoding/"))):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "vars")):
                    dynamic.add((name_of(path), ast.unparse(node)))
                case ast.arg(arg=name, annotation=ast.Name(id="Any")):
                    untyped.add((name_of(path), name))
                case ast.AnnAssign(target=target, annotation=ast.Name(id="Any")):
                    untyped.add((name_of(path), ast.unparse(target)))
    assert dynamic == DYNAMIC_ATTRIBUTES
    assert untyped == UNTYPED_NAMES


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
        return  # a package that offers its modules, not names
    # The version is public by custom, whatever its underscores say.
    assert set(listed) == {n for n in public if not n.startswith("_")} | (public & {"__version__"})


def test_one_version() -> None:
    import asr_serve

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert asr_serve.__version__ == project["version"]
    assert sorted(asr_serve.__all__) == ["AsrServeError", "DEFAULT_MODEL", "__version__", "load", "load_pipeline"]


def test_the_root_of_all_errors_is_public_and_loads_nothing_else() -> None:
    names = "asr_serve.AsrServeError is errors.AsrServeError, {'numpy', 'torch', 'msgspec'} & set(sys.modules)"
    code = f"import sys, asr_serve; from asr_serve import errors; print({names})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "True set()"


def test_files_are_named_after_what_they_define() -> None:
    assert not [name_of(p) for p in SOURCES if p.name in ("utils.py", "common.py", "helpers.py", "misc.py")]


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


NO_SUBJECT = re.compile(
    r"(Of|What|Who|Whose|Whom|Which|That|Where|When|How|It|They|This|These|Those|His|Its|Their|He|She|For|To|By|In|As|With"
    r"|If|From|On|At|Is|Are|Was|Were|Has|Have|So|Nobody|Somebody|Not|There|Then|Them|Here|Because|Into|After|Before|Until"
    r"|Since|Than|Or|And|But)\b"
)
"""Words that leave a docstring without its subject."""


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Docstrings, and the strings under fields and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    yield statement.value


def test_docstrings_begin_with_what_the_thing_is_or_does() -> None:
    weak = [
        f"{name_of(path)}:{text.lineno}: {text.value.strip().splitlines()[0]}"
        for path in SOURCES
        for text in docstrings(ast.parse(path.read_text()))
        if isinstance(text.value, str) and NO_SUBJECT.match(text.value.strip())
    ]
    assert not weak, "\n".join(weak)
