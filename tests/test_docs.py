"""What the documents say is true: links lead somewhere, commands exist, every Python example and every curl runs,
and JSON shown below a command has the keys of what the command answers.

A block that is not to be run is preceded by `<!-- not run: why -->`.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer.main
from children import MODULE_LIMIT_S, Child

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "asr_serve"
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *(ROOT / d / "README.md" for d in ("bench", "deploy"))]
)
ADDRESS = "http://127.0.0.1:8000"
"""Where the documents have their server. The tests put that of one they have started in its place."""
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
def test_links_lead_somewhere(page: Path) -> None:
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
    """A folder to run examples in, with the files that they name."""
    for name in ("talk.wav", "call.wav", "two_cities.wav"):
        shutil.copy(packaged_speech / "two_cities.wav", tmp_path / name)
    for name in ("beckett.wav", "endgame_nagg_nell.wav"):
        shutil.copy(packaged_speech / name, tmp_path)
    monkeypatch.chdir(tmp_path)
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


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=name_of)
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
def test_docstrings_are_true(path: Path) -> None:
    dotted = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(dotted)
    assert inspect.ismodule(module)
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert not found.failed
