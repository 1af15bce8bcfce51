from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import Child
from cli_process import invoke as invoke_cli
from fake_model import FakeModel, load
from typer.testing import CliRunner, Result

import asr_serve
from asr_serve.api.cli import app
from asr_serve.api.cli.exit_codes import BROKEN_PIPE, FAILED, INTERRUPTED, USAGE
from asr_serve.config import EngineConfig

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    fake = FakeModel()

    def load_fake(name: str = "", **options: Any) -> FakeModel:
        load(name)
        fake.engine = options.get("engine")
        return fake

    monkeypatch.setattr(asr_serve, "load", load_fake, raising=False)
    return fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """a/x.wav, b/x.wav, one.wav and torn.wav, which fails at its second segment; the working folder."""
    for name, message in {
        "a/x.wav": "alpha\nbeta", "b/x.wav": "gamma", "one.wav": "one\ntwo", "torn.wav": "half\n!",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(message)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments: str | Path, stdin: bytes | None = None) -> Result:
    return invoke_cli("transcribe", *arguments, stdin=stdin)


def process(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    script = str(Path(__file__).with_name("fake_model.py"))
    return Child([sys.executable, script, *arguments], env=environ, **options)


# --- results on stdout ------------------------------------------------------------------------------------


def test_text_of_one_input_has_no_heading(folder: Path, model: FakeModel) -> None:
    result = invoke("one.wav")
    assert result.stdout == "one\ntwo\n"
    assert "1 done; 2.0 s of audio in " in result.stderr
    assert (result.exit_code, model.closed) == (0, True)


def test_segments_are_written_before_the_file_is_done(folder: Path) -> None:
    (folder / "long.wav").write_text("first\nwait\n")
    with process("transcribe", "long.wav", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"first\n"
        running.kill()


def test_several_inputs_have_headings(folder: Path, model: FakeModel) -> None:
    assert invoke("a", "one.wav").stdout == "==> a/x.wav <==\nalpha\nbeta\n\n==> one.wav <==\none\ntwo\n"


def test_json_of_several_inputs_is_one_document_per_line(folder: Path, model: FakeModel) -> None:
    for form in ("json", "verbose_json", "jsonl"):
        lines = invoke("a", "b", "--format", form).stdout.splitlines()
        assert [json.loads(line)["key"] for line in lines] == ["a/x.wav", "b/x.wav"]
    assert json.loads(invoke("one.wav", "-f", "json").stdout)["text"] == "one two"


def test_subtitles_on_stdout(folder: Path, model: FakeModel) -> None:
    assert invoke("one.wav", "-f", "srt").stdout.startswith("1\n00:00:00,000 --> 00:00:01,000\none\n\n2\n")
    assert invoke("one.wav", "-f", "vtt").stdout.startswith("WEBVTT\n\n00:00:00.000 --> ")


def test_stdin(model: FakeModel) -> None:
    result = invoke("-", "-f", "jsonl", stdin=b"from a pipe")
    assert json.loads(result.stdout) == {
        "key": "stdin", "text": "from a pipe", "language": "en", "duration": 1.0,
        "segments": [{"start": 0.0, "end": 1.0, "text": "from a pipe"}],
    }  # fmt: skip


def test_quiet_and_verbose(folder: Path, model: FakeModel) -> None:
    assert invoke("one.wav", "-q").stderr == ""
    message = invoke("one.wav", "-v", "-o", "out.txt").stderr
    assert "dtype: fp32" in message
    assert "one.wav -> out.txt" in message


def test_options_reach_the_model(folder: Path, model: FakeModel) -> None:
    invoke(
        "one.wav", "--language", "en", "--no-vad", "--silence-schedule", "5000:1500,inf:300",
        "--max-segment-ms", "9000", "--max-duration-s", "60",
    )  # fmt: skip
    options = model.options
    assert options is not None
    assert (options.language, options.vad, options.max_segment_ms) == ("en", False, 9_000)
    assert (options.limits.max_duration_s, str(options.silence_schedule)) == (60.0, "5000:1500,inf:300")
    assert model.engine == EngineConfig()


def test_engine_settings_reach_the_engine(folder: Path, model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_SERVE_ENGINE__BEAM", "3")  # a server's
    invoke("one.wav", "--set", "engine.use_chunked_inference=true", "--set", "engine.head=ctc")
    assert model.engine == EngineConfig(use_chunked_inference=True, head="ctc")


# --- failures ---------------------------------------------------------------------------------------------


def test_failed_files_are_reported_at_the_end_and_others_finish(folder: Path, model: FakeModel) -> None:
    result = invoke("missing.wav", "torn.wav", "one.wav", "--format", "jsonl")
    assert [json.loads(line)["key"] for line in result.stdout.splitlines()] == ["one.wav"]
    summary, first, second = result.stderr.splitlines()
    assert summary.startswith("1 done, 2 failed; ")
    assert first == "failed: missing.wav: the file 'missing.wav' does not exist. check the path."
    assert second == "failed: torn.wav: torn.wav broke. record it again."
    assert result.exit_code == FAILED


def test_failures_are_reported_even_when_quiet(folder: Path, model: FakeModel) -> None:
    assert "failed: torn.wav" in invoke("torn.wav", "-q").stderr


def test_prompts_hot_words_and_long_form_reach_the_model(folder: Path, model: FakeModel) -> None:
    assert invoke("one.wav").exit_code == 0
    assert model.options is not None
    assert (model.options.prompt, model.options.hotwords, model.options.long_form) == ("", (), "parallel")
    message = ["--prompt", "A talk.", "--hotword", "Ada", "--hotword", "Charles Babbage", "--long-form", "sequential"]
    assert invoke("one.wav", *message).exit_code == 0
    assert (model.options.prompt, model.options.hotwords) == ("A talk.", ("Ada", "Charles Babbage"))
    assert model.options.long_form == "sequential"


def test_help_has_examples_of_prompts() -> None:
    page = invoke("--help").stdout
    message = " ".join(page.replace("│", " ").split())
    for example in ("--hotwords 'Kubernetes,Ada Lovelace'", "--long-form sequential", '--prompt "A talk'):
        assert example in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one.wav", "--format", "strt"], "did you mean 'srt'?"),
        (["one.wav", "--model", "moonshine-tiny"], "did you mean 'moonshine-tiny-en'?"),
        (["one.wav", "--silence-schedule", "5000"], "LENGTH_MS:SILENCE_MS"),
        (["one.wav", "--max-duration-s", "0"], "more than 0 seconds"),
        (
            ["one.wav", "--n-best", "3"],
            "--n-best 3 with the format text. a format with a place for alternatives: json,",
        ),
        (["one.wav", "--n-best", "51", "-f", "json"], "n_best=51. a whole number from 1 to 50"),
        (["one.wav", "--long-form", "sequentail"], "did you mean 'sequential'?"),
        (["one.wav", "--resume"], "add --output DIR"),
        (["one.wav", "--set", "engine.beam"], "NAME=VALUE, like --set engine"),
        (["one.wav", "--pipeline", "chain-lm", "-m", "whisper-tiny-en"], "--model whisper-tiny-en beside --pipeline"),
        (["one.wav", "--set", "engine.beam=0"], "engine.beam=0 (flag --set). a whole number, 1 to 128"),
        (["one.wav", "--set", "engine.baem=2"], "did you mean 'engine.beam'?"),
        (["one.wav", "--set", "engine.beam=2", "--set", "engine.beam=3"], "engine.beam is given twice"),
        (["one.wav", "--set", "max_duration_s=60"], "it is a server's: asr-serve serve --set"),
        (["a", "b", "--output", "all.srt"], "there are 2 inputs"),
        (["one.wav", "--output", "one.wav", "--format", "text"], "would overwrite the input"),
        (["one.wav", "--output", "one.docx"], "a folder, or a file that ends in .json, .txt, .srt, .vtt, .jsonl"),
        (["one.wav", "--output", "one.txtgrid"], "did you mean '.TextGrid'?"),
        (["one.wav", "--num-speakers", "0"], "num_speakers=0. a whole number from 1 to 32"),
        (["one.wav", "--max-speakers", "33"], "max_speakers=33. a whole number from 1 to 32"),
        (["bad.scp"], "bad.scp, line 1: "),
        (["none.txt"], "lists no audio"),
        (["list.txt", "-f", "jsonl", "-o", "list.txt"], "would overwrite the input"),
        (["one.wav", "-o", "one.wav/sub/"], "cannot make the folder"),
    ],
)
def test_wrong_usage_is_one_sentence(folder: Path, model: FakeModel, arguments: list[str], message: str) -> None:
    (folder / "bad.scp").write_text("utt1 rm -rf / |\n")
    (folder / "none.txt").write_text("# nothing yet\n")
    (folder / "list.txt").write_text("one.wav\n")
    result = invoke(*arguments)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.exit_code == USAGE
    assert model.heard == []
    assert (folder / "one.wav").read_text() == "one\ntwo"


@pytest.mark.parametrize(("wrong", "near"), [("--formatt", "--format"), ("--outptu", "--output")])
def test_an_unknown_option_suggests_the_nearest(folder: Path, wrong: str, near: str) -> None:
    result = invoke("one.wav", wrong, "x")
    assert near in result.stderr.replace(wrong, "")
    assert result.exit_code == USAGE


@pytest.mark.parametrize(
    ("content", "arguments"),
    [('{"key": "old", "text": "kept"}\n', ["-m", "moonshine-tiny"]), ('{"key": "a", "wav": "a.wav"}\n', ["--resume"])],
    ids=["unknown model", "resume of a foreign file"],
)
def test_wrong_usage_keeps_an_older_jsonl(folder: Path, model: FakeModel, content: str, arguments: list[str]) -> None:
    (folder / "all.jsonl").write_text(content)
    assert invoke("one.wav", "-o", "all.jsonl", *arguments).exit_code == USAGE
    assert (folder / "all.jsonl").read_text() == content


# --- results in files -------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".asr-serve.jsonl"
    }


@pytest.mark.parametrize(
    ("arguments", "files", "code"),
    [
        (["one.wav", "-o", "out/one.vtt"], {"one.vtt": "WEBVTT\n"}, 0),
        (
            ["a", "b", "one.wav", "-o", "out"],
            {"a/x.txt": "alpha\nbeta\n", "b/x.txt": "gamma\n", "one.txt": "one\ntwo\n"},
            0,
        ),
        (["a/x.wav", "-o", "out/", "-f", "srt"], {"x.srt": "1\n"}, 0),
        (["torn.wav", "one.wav", "-o", "out"], {"one.txt": "one\n"}, FAILED),
    ],
    ids=["suffix tells the format", "folder keeps inputs apart", "plain name", "failed inputs leave no file"],
)
def test_output_files(folder: Path, model: FakeModel, arguments: list[str], files: dict[str, str], code: int) -> None:
    result = invoke(*arguments)
    assert (result.stdout, result.exit_code) == ("", code)
    found = tree(folder / "out")
    assert found.keys() == files.keys()
    assert all(found[name].startswith(content) for name, content in files.items())
    assert arguments[0] != "a" or found == files


def test_equal_stems_and_odd_keys_get_files_of_their_own(folder: Path, model: FakeModel) -> None:
    (folder / "a/x.mp3").write_text("mp3")
    (folder / "keys.jsonl").write_text(
        "".join(
            json.dumps({"key": key, "wav": f"{folder}/one.wav"}) + "\n"
            for key in ("../up", "/etc/passwd", "q?q", "q*q", "K", "k", "long" * 100, "..", ".")
        )
    )
    result = invoke("a", "keys.jsonl", "-o", "out")
    written = [Path(name) for name in tree(folder / "out")]
    assert result.exit_code == 0
    assert len({str(name).casefold() for name in written}) == len(written) == 11
    assert {"x.wav.txt", "x.mp3.txt"} <= set(map(str, written))
    assert not (folder / "up.txt").exists()


def test_resume_skips_finished_results(folder: Path, model: FakeModel) -> None:
    invoke("a", "torn.wav", "-o", "out", "-f", "json")
    (folder / "torn.wav").write_text("whole now")
    model.heard.clear()
    result = invoke("a", "torn.wav", "-o", "out", "-f", "json", "--resume")
    assert model.heard == ["torn.wav"]
    assert "1 done, 1 already there" in result.stderr
    model.heard.clear()
    (folder / "out/a/x.json").write_text('{"key": "a/x')  # torn by another program
    invoke("a", "torn.wav", "-o", "out", "-f", "json", "--resume")
    assert model.heard == ["a/x.wav"]


def test_resume_with_all_done_loads_no_model(folder: Path, model: FakeModel) -> None:
    invoke("one.wav", "-o", "one.srt")
    model.heard.clear()
    result = invoke("one.wav", "-o", "one.srt", "--resume", "-m", "moonshine-tiny")
    assert (result.exit_code, model.heard) == (0, [])
    assert "nothing to do" in result.stderr


def test_resume_never_takes_the_result_of_another_file(folder: Path, model: FakeModel) -> None:
    invoke("a/x.wav", "-o", "out")
    assert tree(folder / "out") == {"x.txt": "alpha\nbeta\n"}
    invoke("b/x.wav", "-o", "out", "--resume")
    assert model.heard == ["a/x.wav", "b/x.wav"]


def test_resume_of_jsonl_repairs_a_torn_line(folder: Path, model: FakeModel) -> None:
    invoke("a", "-o", "all.jsonl")
    whole = (folder / "all.jsonl").read_text()
    (folder / "all.jsonl").write_text(whole + '{"key": "b/x.wav", "te')
    model.heard.clear()
    invoke("a", "b", "-o", "all.jsonl", "--resume")
    assert model.heard == ["b/x.wav"]
    lines = (folder / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["a/x.wav", "b/x.wav"]
    (folder / "all.jsonl").write_text(whole.rstrip("\n"))  # only the line feed was lost
    invoke("a", "b", "-o", "all.jsonl", "--resume")
    assert (folder / "all.jsonl").read_text().startswith(whole)


def test_jsonl_into_a_folder(folder: Path, model: FakeModel) -> None:
    invoke("a", "b", "-f", "jsonl", "-o", "out/")
    assert len((folder / "out/transcripts.jsonl").read_text().splitlines()) == 2


# --- how it ends ------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_finished_results(folder: Path) -> None:
    (folder / "long.wav").write_text("first\nwait\n")
    arguments = ("transcribe", "one.wav", "long.wav", "-v", "-o", "out")
    with process(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if line.startswith(b"one.wav -> "):
                break
        running.send_signal(signal.SIGINT)
        stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == INTERRUPTED
    assert stderr == b"interrupted\n"
    assert stdout == b""
    assert tree(folder / "out") == {"one.txt": "one\ntwo\n"}
    assert not list((folder / "out").glob(".*.part"))


def test_ctrl_c_cancels_the_requests(folder: Path, model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "lines", interrupted)
    assert invoke("one.wav").exit_code == INTERRUPTED
    assert (model.cancelled, model.closed) == (True, True)


def test_a_closed_reader_ends_the_command_quietly(folder: Path) -> None:
    (folder / "long.wav").write_text("line\n" * 50_000)
    with process("transcribe", "long.wav", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == b"line\n"
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == BROKEN_PIPE


def test_an_output_that_cannot_be_written_is_named_as_the_user_did(folder: Path) -> None:
    with process("transcribe", "one.wav", "-o", "/proc/x.srt", stderr=subprocess.PIPE) as running:
        _, stderr = running.communicate(timeout=60)
    assert running.returncode == 1
    assert stderr.splitlines()[-1] == b"error: No such file or directory: /proc/x.srt."


def test_a_full_disk_is_an_error_not_a_traceback(folder: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with (
        open("/dev/full", "wb") as full,
        process("transcribe", "one.wav", stdout=full, stderr=subprocess.PIPE) as running,
    ):
        assert running.stderr is not None
        message = running.stderr.read()
    assert b"No space left" in message
    assert b"Traceback" not in message
    assert running.returncode == FAILED


def test_help_is_fast_because_it_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "from asr_serve.api.cli import app\n"
        "for command in (['--help'], ['transcribe', '--help'], ['models', '--help'], ['doctor', '--help']):\n"
        "    app(command, standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'av', 'soxr', 'huggingface_hub', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert b"--silence-schedule" in done.stdout


@pytest.mark.parametrize("command", [[], ["transcribe"], ["models", "list"], ["models", "show"], ["doctor"]])
def test_every_help_has_an_example(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "asr-serve " in result.stdout


def test_version() -> None:
    assert invoke_cli("--version").stdout.startswith("asr-serve ")


def test_an_unknown_command_is_wrong_usage() -> None:
    result = invoke_cli("transcrib")
    assert "transcribe" in result.stderr
    assert result.exit_code == USAGE
