"""What the documents say is true: links lead somewhere, commands exist, every Python example and every curl runs,
and JSON shown below a command has the keys of what the command answers.

A block that is not to be run is preceded by `<!-- not run: why -->`.
"""

from __future__ import annotations

import csv
import doctest
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import textwrap
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from children import MODULE_LIMIT_S, Child
from typer.testing import CliRunner

from asr_serve.errors import OptionError
from asr_serve.text.formats.registry import TRANSCRIPT_FORMATS
from asr_serve.types import Segment, Transcript

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "asr_serve"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *(ROOT / d / "README.md" for d in ("bench", "deploy"))])
ADDRESS = "http://127.0.0.1:8000"
"""Where the documents have their server. The tests put that of one they have started in its place."""
EXAMPLE_S = 12
"""Of speech in the files that the documents name."""
BLOCK = re.compile(r"(<!-- not run:[^\n]*-->\n+)?^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The page's code in one language, without what it says is not run."""
    found = BLOCK.finditer(page.read_text())
    return [block[3] for block in found if block[2] == language and block[1] is None]


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ +(.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_have_targets(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue  # the network is not asked
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_named_in_the_text_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|bench|docs|examples)/[\w./-]+\.(?:py|md|toml|cpp|h))`", prose(page))
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    app = importlib.import_module("asr_serve.api.cli").app
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s[|;&]+\s", line.split(" #")[0]):
                words = part.split()
                if words[:1] == ["make"]:
                    assert {w for w in words[1:] if "=" not in w} <= targets, line
                elif words[:1] == ["asr-serve"]:
                    check_command(typer.main.get_command(app), words[1:], line)


def check_command(command: object, words: list[str], line: str) -> None:
    """Every subcommand and option of a line of shell is one the program has."""
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        assert words[0] in command.commands, line
        command, words = command.commands[words[0]], words[1:]
    known = {"-h", "--help"} | {option for parameter in command.params for option in parameter.opts}
    options = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert options <= known, line


@pytest.fixture
def beside_audio(packaged_speech: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run examples in, with the files that they name. One thread: the tests run in several processes."""
    with wave.open(str(packaged_speech / "two_cities.wav")) as whole:
        settings, begun = whole.getparams(), whole.readframes(EXAMPLE_S * whole.getframerate())
    for name in ("talk.wav", "call.wav", "two_cities.wav"):
        with wave.open(str(tmp_path / name), "wb") as short:
            short.setparams(settings)
            short.writeframes(begun)
    for name in ("beckett.wav", "endgame_nagg_nell.wav"):
        shutil.copy(packaged_speech / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASR_SERVE_THREADS", "1")
    return tmp_path


@pytest.fixture(scope="module")
def address(packaged_speech: Path) -> Iterator[str]:
    """Of a server."""
    command = [sys.executable, "-c", "from asr_serve.api.cli import main; main()", "serve", "--port", "0"]
    command += ["--set", "engine.prefix_bytes=0"]  # an example is the first time that anybody asks
    command += ["--alias", "whisper-1=moonshine-tiny-en", "--set", "engine_threads=1", "--set", "log_level=error"]
    command += ["--voice", "hibari"]
    with Child(command, stderr=subprocess.PIPE, text=True, limit_s=MODULE_LIMIT_S) as process:
        assert process.stderr
        said = ""
        while not (ready := re.search(r" on (http://\S+) \(ready", said)):
            line = process.stderr.readline()
            assert line, f"the server ended: {said}"
            said += line
        yield ready[1]
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture
def here(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """An example, made to ask our server where it asks one."""

    def rewritten(example: str) -> str:
        host = ADDRESS.removeprefix("http://")
        if host not in example:
            return example
        return example.replace(host, request.getfixturevalue("address").removeprefix("http://"))

    return rewritten


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_python_in_the_pages_runs(
    page: Path, beside_audio: Path, here: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {"__name__": "example"}
    for block in blocks(page, "python"):
        exec(compile(here(textwrap.dedent(block)), str(page), "exec"), names)
    assert "best of times" in capsys.readouterr().out


SERVING = {"voice_agent.py", "dynamo_worker.py"}
"""Programs that serve until they are stopped: tests/edge/test_telephone_calls.py, tests/api/test_dynamo_worker.py."""
EXAMPLES = [path for path in sorted(ROOT.glob("examples/*.py")) if path.name not in SERVING]
"""Programs that end by themselves."""


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_examples_run(
    path: Path,
    beside_audio: Path,
    here: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "talk.wav", "call.wav"])
    exec(compile(here(path.read_text()), str(path), "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert "two_cities.wav" in said or said.count("best of times") == 2


def with_curl() -> list[object]:
    """The commands that ask a server, and the JSON that is shown below them or None."""
    found = []
    for page in PAGES:
        matches = list(BLOCK.finditer(page.read_text()))
        for block, below in zip(matches, [*matches[1:], None], strict=False):
            if block[1] or block[2] != "sh" or not block[3].startswith("curl ") or ADDRESS not in block[3]:
                continue
            answer = below and below[2] == "json" and below.start() == block.end() + 1
            line = page.read_text()[: block.start()].count("\n") + 2
            found.append(pytest.param(block[3], below[3] if answer else None, id=f"{name_of(page)}:{line}"))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl")
@pytest.mark.parametrize(("command", "shown"), with_curl())
def test_curl_in_the_pages_runs(
    command: str, shown: str | None, beside_audio: Path, here: Callable[[str], str]
) -> None:
    done = subprocess.run(["sh", "-ec", here(command)], capture_output=True, text=True, check=True, timeout=60)
    written = re.search(r" -o (\S+)", command)
    assert done.stdout or (written and (beside_audio / written[1]).stat().st_size)
    if shown is not None:
        assert shape(json.loads(done.stdout)) == shape(json.loads(shown))


def shape(data: object) -> object:
    """What is left of JSON without its values; a list is as its first item."""
    match data:
        case dict():
            return {key: shape(value) for key, value in data.items()}
        case list():
            return [shape(value) for value in data[:1]]
        case bool() | None:
            return data
        case int() | float():
            return "number"
        case _:
            return type(data).__name__


WITH_DOCTESTS = [path for path in sorted(PACKAGE.rglob("*.py")) if re.search(r"^\s*>>> ", path.read_text(), re.M)]


@pytest.mark.parametrize("path", WITH_DOCTESTS, ids=name_of)
def test_examples_in_docstrings_run(path: Path) -> None:
    dotted = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(dotted)
    assert inspect.ismodule(module)
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert not found.failed


# --- formats: one table, and the pages that list it --------------------------------------------------------


def first_column(page: Path, heading: str) -> list[str]:
    """The code in the first column of the table below a heading: `a`, `b`."""
    section = page.read_text().split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def test_pages_and_help_list_every_format() -> None:
    names = {*TRANSCRIPT_FORMATS}
    assert {*first_column(ROOT / "docs/transcripts.md", "## Formats")} == names
    assert {*first_column(ROOT / "docs/http.md", "### Formats")} == names | {"diarized_json"}
    app = importlib.import_module("asr_serve.api.cli").app
    options = typer.main.get_command(app).commands["transcribe"].params
    shown = next(option.help for option in options if "--format" in option.opts)
    assert names <= {*re.findall(r"\w+", shown)}


def test_the_format_of_the_page_is_one(beside_audio: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of docs/adding-a-format.md, in the table: the command line chooses it by the name of a file."""
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs/adding-a-format.md", "python")[:2]:
        exec(block, names)
    monkeypatch.setitem(TRANSCRIPT_FORMATS, "csv", names["CSV"])
    app = importlib.import_module("asr_serve.api.cli").app
    done = CliRunner().invoke(app, ["transcribe", "talk.wav", "-o", "talk.csv", "--quiet"])
    assert done.exit_code == 0, done.output
    header, *rows = csv.reader((beside_audio / "talk.csv").read_text().splitlines())
    assert header == ["start", "end", "speaker", "text"]
    assert "best of times" in rows[0][3]
    assert all(float(start) < float(end) for start, end, *_ in rows)


# --- protocols ---------------------------------------------------------------------------------------------


def test_the_protocol_of_the_page_is_one() -> None:
    """The form and the answer of docs/adding-a-protocol.md; its route is built of names that exist."""
    page = (ROOT / "docs/adding-a-protocol.md").read_text()
    form, route = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[:2]
    names: dict[str, Any] = {}
    exec(form, names)
    request = names["parse_inference_form"]({"language": ["en"], "response_format": ["srt"]}, complete=True)
    assert request.options.language == "en"
    with pytest.raises(OptionError, match="did you mean 'srt'"):
        names["parse_inference_form"]({"response_format": ["strt"]}, complete=True)
    hello = Transcript("a.wav", "Hello.", "en", 16_000, (Segment(0, 16_000, "Hello."),), "moonshine-tiny-en")
    body, media_type = names["render_inference"](hello, request)
    assert body.startswith(b"1\n00:00:00,000 --> ")
    assert media_type.startswith("application/x-subrip")
    exec(route, names)
    assert [each.path for each in names["routes"](None).routes] == ["/inference"]


# --- figures: README quotes what committed benches printed, each with the pause that decides it --------------


def bench_row(report: str, /, **chosen: object) -> dict[str, Any]:
    """The one row of a committed report with these values."""
    rows = json.loads((ROOT / "bench" / "results" / f"{report}.json").read_text())["rows"]
    (found,) = [row for row in rows if all(row.get(key) == value for key, value in chosen.items())]
    return found


def measured_cells() -> list[tuple[str, str]]:
    """What a cell of README's table must say, by the start of its row."""
    offline = bench_row("offline-decoder-cpu", name="asr-serve")
    whisper = bench_row("whisper-offline-cpu", name="asr-serve beam 5 vad")
    peer = bench_row("whisper-offline-cpu", name="faster-whisper batched")
    serve = bench_row("serve-cpu", system="asr-serve", clients=32)
    speak = bench_row("speak-cpu", system="asr-serve", way="talk", callers=1)
    first, late = (int(speak[f"first_audio_{of}_ms"] + 0.5) for of in ("p50", "p95"))  # halves go up
    cells = [
        ("Whole files, Moonshine tiny", f"{offline['rtfx']:.0f} x real time, WER {offline['wer']:.2f} %"),
        ("Whole files, Whisper", f"{whisper['rtfx']:.0f} x, WER {whisper['wer']:.2f} %"),
        ("Whole files, Whisper", f"{peer['rtfx']:.0f} x, {peer['wer']:.2f} %"),
        ("HTTP, 32 clients", f"p50 {serve['p50_ms']:,.0f} ms, p99 {serve['p99_ms']:,.0f} ms"),
        ("Speech, 1 caller", f"p50 {first} ms, p95 {late} ms"),
    ]
    few = bench_row("live-cpu", system="asr-serve", callers=8)
    many = bench_row("live-many-cpu", system="asr-serve", callers=48)
    for live in (few, many):
        latencies = f"p50 {live['final_p50_ms']:.0f} ms, p95 {live['final_p95_ms']:.0f} ms"
        cells.append((f"Live, {live['callers']} callers", latencies))
    cells.append(("Live, 8 callers", f"the pause itself: {few['silence_mean_ms']:,.0f} ms"))
    cells.append(("Live, 48 callers", f"WER {many['wer']:.2f} % | WER offline: {many['offline_wer']:.2f} %"))
    return cells


@pytest.mark.parametrize(("row", "cell"), measured_cells())
def test_figures_of_the_readme_are_those_of_the_benches(row: str, cell: str) -> None:
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| {row}")]
    assert lines
    assert any(cell in line for line in lines), cell
