"""FunASR's guide, sections 3, 5, 6 and 8: its programs and its clients, as they are written, over one real server."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile
from children import MODULE_LIMIT_S, Child
from sharp_folders import require_speakers, write_sharp

import asr_serve
from asr_serve.api.cli import exit_codes
from asr_serve.api.library import Model
from asr_serve.audio.reader import read_audio
from asr_serve.errors import NoCheckpoint, OptionError, UnknownModel, WeightsMissing
from asr_serve.funasr import client_python, demo_vllm, serve_realtime_ws, serve_vllm
from asr_serve.funasr.programs import run_program
from asr_serve.server.realtime.funasr.session_defaults import read_hotwords

NAME = "FunAudioLLM/Fun-ASR-Nano-2512"
HOTWORDS = ("开放时间", "张三")


@pytest.fixture(scope="module")
def place(packaged_speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the files that the guide names."""
    folder = tmp_path_factory.mktemp("guide")
    write_sharp("nano", folder / NAME)
    soundfile.write(folder / "audio.wav", read_audio(packaged_speech / "beckett.wav")[:48_000], 16_000)
    shutil.copy(folder / "audio.wav", folder / "meeting.wav")
    (folder / "wav.scp").write_text("first audio.wav\nsecond meeting.wav\n")
    (folder / "hotword_list").write_text("\n".join((*HOTWORDS, "")), "utf-8")
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


@pytest.fixture(scope="module")
def library(place: Path) -> Iterator[Model]:
    with asr_serve.load(str(place / NAME)) as model:
        yield model


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    """Host and port of a server that the guide's command for live recognition has started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "asr_serve.funasr.serve_realtime_ws", "--model", NAME]
    command += ["--port", str(port), "--language", "中文", "--hotword-file", "hotword_list"]
    with Child(command, stderr=subprocess.PIPE, text=True, limit_s=MODULE_LIMIT_S, cwd=place) as process:
        assert process.stderr
        said = ""
        while " (ready" not in said:
            line = process.stderr.readline()
            assert line, f"the server ended: {said}"
            said += line
        yield f"127.0.0.1:{port}"
        process.terminate()
        process.communicate(timeout=60)


def run(snippet: str, address: str, **names: Any) -> dict[str, Any]:
    """Runs a snippet of the guide, which has its server on this machine."""
    with contextlib.ExitStack() as opened:
        names["open"] = lambda *args: opened.enter_context(Path(args[0]).open(*args[1:]))
        exec(re.sub(r"localhost:\d+", address, snippet), names)
    return names


def spoken(model: Model, path: str, **options: Any) -> str:
    """Text of the library."""
    [found] = model.transcribe(path, **options)
    assert found.text
    return found.text


# --- clients --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_curl_asks_asr(here: Path, address: str, library: Model) -> None:
    command = """
curl -X POST http://localhost:8899/asr \\
    -F "file=@meeting.wav" -F "language=中文" -F "spk=true"
"""
    words = [*shlex.split(command.replace("\\\n", "").replace("localhost:8899", address)), "-s"]
    require_speakers(library)
    answer = json.loads(subprocess.run(words, capture_output=True, check=True, timeout=120).stdout)
    assert answer["text"] == spoken(library, "meeting.wav", language="zh")
    assert set(answer) == {"text", "segments", "duration", "processing_time", "rtf"}
    assert answer["duration"] == 3.0
    assert {each["speaker"] for each in answer["segments"]} == {"SPK0"}
    assert not any("words" in each for each in answer["segments"]), "the model has no times of words"


@pytest.mark.slow
def test_requests_asks_asr(here: Path, address: str, library: Model) -> None:
    require_speakers(library)
    names = run(
        """
import requests
resp = requests.post("http://localhost:8899/asr",
    files={"file": open("audio.wav", "rb")},
    data={"language": "中文", "spk": "true"})
result = resp.json()
""",
        address,
    )
    assert names["result"]["text"] == spoken(library, "audio.wav", language="zh")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_javascript_asks_asr(here: Path, address: str, library: Model) -> None:
    require_speakers(library)
    snippet = """
const form = new FormData();
form.append("file", audioBlob, "audio.wav");
form.append("language", "中文");
form.append("spk", "true");
const resp = await fetch("http://localhost:8899/asr", { method: "POST", body: form });
const result = await resp.json();
""".replace("localhost:8899", address)
    before = 'const audioBlob = new Blob([(await import("node:fs")).readFileSync("audio.wav")]);'
    script = f"{before}{snippet}console.log(JSON.stringify(result));"
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script], capture_output=True, check=True, timeout=120, text=True
    )
    assert json.loads(done.stdout)["text"] == spoken(library, "audio.wav", language="zh")


@pytest.mark.slow
def test_openais_client(here: Path, address: str, library: Model, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(
        """
from openai import OpenAI
client = OpenAI(base_url="http://localhost:8899/v1", api_key="none")
result = client.audio.transcriptions.create(
    model="fun-asr-nano",
    file=open("audio.wav", "rb"),
    response_format="verbose_json",
)
print(result.text)
""",
        address,
    )
    names["client"].close()
    text = spoken(library, "audio.wav")
    assert capsys.readouterr().out == f"{text}\n"
    assert [each.text for each in names["result"].segments] == [text]


@pytest.mark.slow
def test_curl_asks_in_openais_form(here: Path, address: str, library: Model) -> None:
    command = """
curl -X POST http://localhost:8899/v1/audio/transcriptions \\
    -F "file=@audio.wav" -F "model=fun-asr-nano" -F "response_format=verbose_json"
"""
    words = [*shlex.split(command.replace("\\\n", "").replace("localhost:8899", address)), "-s"]
    answer = json.loads(subprocess.run(words, capture_output=True, check=True, timeout=120).stdout)
    assert {"task", "language", "duration", "text", "segments"} <= set(answer)
    assert answer["text"] == spoken(library, "audio.wav")


def lines(segments: Any) -> str:
    return "".join(f"[{round(each.start_s * 1000) / 1000:.1f}s] {each.text}\n" for each in segments)


@pytest.mark.slow
def test_the_offline_websocket(here: Path, address: str, library: Model, capsys: pytest.CaptureFixture[str]) -> None:
    run(
        textwrap.dedent("""
        import asyncio, websockets, json, numpy as np, soundfile as sf

        async def offline_ws(audio_path):
            audio, sr = sf.read(audio_path)
            pcm = (audio * 32768).astype(np.int16)

            async with websockets.connect("ws://localhost:8899/ws") as ws:
                await ws.send("START")
                await ws.recv()
                await ws.send("LANGUAGE:中文")
                await ws.recv()

                # Send complete audio
                await ws.send(pcm.tobytes())
                await ws.send("STOP")

                # Receive result
                async for msg in ws:
                    data = json.loads(msg)
                    if data.get("is_final"):
                        for s in data["sentences"]:
                            print(f"[{s['start']/1000:.1f}s] {s['text']}")
                        break

        asyncio.run(offline_ws("audio.wav"))
        """),
        address,
    )
    [wanted] = library.transcribe("audio.wav", language="zh", hotwords=HOTWORDS)
    assert capsys.readouterr().out == lines(wanted.segments)


@pytest.mark.slow
def test_the_live_websocket(here: Path, address: str, library: Model, capsys: pytest.CaptureFixture[str]) -> None:
    """Without LANGUAGE and HOTWORDS: they are those that the server was started with."""
    run(
        textwrap.dedent("""
        import asyncio, websockets, numpy as np, json

        async def stream(audio_path):
            import soundfile as sf
            audio, sr = sf.read(audio_path)
            pcm = (audio * 32768).astype(np.int16)

            async with websockets.connect("ws://localhost:10095") as ws:
                await ws.send("START")
                await ws.recv()

                for i in range(0, len(pcm), 1600):
                    await ws.send(pcm[i:i+1600].tobytes())
                    await asyncio.sleep(0.05)

                await ws.send("STOP")
                async for msg in ws:
                    data = json.loads(msg)
                    if data.get("is_final"):
                        for s in data["sentences"]:
                            print(f"[{s['start']/1000:.1f}s] {s['text']}")
                        break

        asyncio.run(stream("audio.wav"))
        """),
        address,
    )
    *_, wanted = library.stream("audio.wav", language="zh", hotwords=HOTWORDS)
    assert wanted.segments
    assert capsys.readouterr().out == lines(wanted.segments)


def letters(text: str) -> str:
    """A text without spaces and control characters, which a terminal does not get."""
    return "".join(letter for letter in text if letter.isprintable() and letter != " ")


@pytest.mark.slow
def test_the_python_client(here: Path, address: str, library: Model) -> None:
    command = f"-m asr_serve.funasr.client_python --server ws://{address} --file audio.wav --language 中文"
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, check=True, timeout=120)
    *_, wanted = library.stream("audio.wav", language="zh")
    text = "\n".join(each.text for each in wanted.segments)
    assert letters(done.stdout.decode()) == letters(text) != ""


@pytest.mark.slow
def test_a_format_of_words_without_words(here: Path, address: str, tmp_path: Path) -> None:
    """A model without times of words writes whole segments; --words itself is refused."""
    command = [sys.executable, "-c", "from asr_serve.api.cli import main; main()", "listen", "audio.wav"]
    command += ["--server", f"http://{address}"]
    written = tmp_path / "talk.ctm"
    subprocess.run([*command, "-o", str(written)], capture_output=True, check=True, timeout=120)
    assert written.exists()
    refused = subprocess.run([*command, "--words"], capture_output=True, check=False, timeout=120)
    assert refused.returncode == 1
    assert b"no times of words" in refused.stderr


# --- commands -------------------------------------------------------------------------------------------------


def test_the_demo_transcribes(here: Path, library: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def demo(command: str) -> str:
        words = shlex.split(command)
        assert words[:2] == ["python", "demo_vllm.py"]
        demo_vllm.main([*words[2:], "--model", NAME])
        return capsys.readouterr().out

    greedy = {"temperatures": (0.0,)}
    chinese = spoken(library, "audio.wav", language="zh", **greedy)
    named = spoken(library, "audio.wav", hotwords=("张三", "北京"), **greedy)
    assert demo("python demo_vllm.py --input audio.wav --language 中文") == f"[audio] {chinese}\n"
    text = spoken(library, "audio.wav", **greedy)
    listed = demo("python demo_vllm.py --input wav.scp --tensor-parallel-size 4 --batch-size 32")
    assert listed == f"[first] {text}\n[second] {text}\n"
    results = tmp_path / "results.jsonl"
    demo(f"python demo_vllm.py --input audio.wav --hotwords 张三 北京 --output {results}")
    [written] = [json.loads(line) for line in results.read_text("utf-8").splitlines()]
    assert (written["key"], written["text"]) == ("audio", named)
    command = ["--input", "gone.wav", "audio.wav", "--model", NAME, "--on-error", "record"]
    assert demo_vllm.main(command) == exit_codes.FAILED
    printed = capsys.readouterr()
    assert printed.out == f"[audio] {text}\n"
    assert "2 recordings, 1 failed" in printed.err
    assert "failed: gone: " in printed.err


def test_the_server_for_recordings_is_ours(here: Path) -> None:
    command = "--port 8899 --model FunAudioLLM/Fun-ASR-Nano-2512 --gpu-memory-utilization 0.5"
    made = serve_vllm.arguments(shlex.split(command))
    assert made[:8] == ["serve", "--host", "127.0.0.1", "--port", "8899", "--model", "fun-asr-nano", "--weights"]
    assert Path(made[8]) == (here / NAME).resolve()
    assert "--max-model-len" not in made
    assert serve_vllm.arguments(["--model", "moonshine-tiny-en", "--host", "0.0.0.0"])[:5] == (
        ["serve", "--host", "0.0.0.0", "--port", "8000"]
    )
    assert "fun-asr-nano=moonshine-tiny-en" in serve_vllm.arguments(["--model", "moonshine-tiny-en"])


def test_the_live_server_is_ours(here: Path) -> None:
    command = f"--port 10095 --language 中文 --hotword-file hotword_list --model {NAME} --max-model-len 4096"
    made = serve_realtime_ws.arguments(shlex.split(command))
    assert made[3:5] == ["--port", "10095"]
    settings = [made[i + 1] for i, word in enumerate(made) if word == "--set"]
    assert settings == ["funasr_language=中文", f"funasr_hotwords_file={here / 'hotword_list'}"]
    assert read_hotwords("hotword_list") == HOTWORDS
    with pytest.raises(OptionError, match="funasr_hotwords_file"):
        read_hotwords("missing")
    with pytest.raises(UnknownModel):
        serve_realtime_ws.arguments(["--model", "nothing"])


@pytest.mark.parametrize(
    ("command", "ours"),
    [
        ("--server ws://localhost:10095 --mic", "listen --server ws://localhost:10095 --mic"),
        (
            "--server ws://localhost:10095 --file audio.wav",
            "listen --server ws://localhost:10095 audio.wav --real-time",
        ),
        (
            "--mic --hotwords 张三,北京 --spk",
            "listen --server ws://localhost:10095 --mic --hotwords 张三,北京 --speakers",
        ),
    ],
)
def test_the_client_is_listen(command: str, ours: str) -> None:
    assert client_python.arguments(shlex.split(command)) == shlex.split(ours)


@pytest.mark.parametrize(
    ("main", "command", "said"),
    [
        (demo_vllm.main, "--input a.wav --batch-size 0", "--batch-size 0"),
        (demo_vllm.main, "--input a.wav --dtype int4", "--dtype 'int4'"),
        (serve_vllm.arguments, "--gpu-memory-utilization 2", "--gpu-memory-utilization 2.0"),
        (serve_vllm.arguments, "--max-model-len 0", "--max-model-len 0"),
        (serve_realtime_ws.arguments, "--hotword-file gone", "--hotword-file 'gone'"),
        (serve_realtime_ws.arguments, "--model moonshine-tiny-en --language 中文", "unknown language"),
    ],
)
def test_errors_name_the_flags_that_were_typed(main: Callable[[list[str]], object], command: str, said: str) -> None:
    with pytest.raises(OptionError, match=f"^{said}") as refused:
        main(shlex.split(command))
    assert refused.value.param in command


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OptionError("hub='xx'", param="hub"), exit_codes.USAGE),
        (UnknownModel("no model"), exit_codes.USAGE),
        (WeightsMissing("no weights"), exit_codes.FAILED),
        (NoCheckpoint("no model there"), exit_codes.USAGE),
        (KeyboardInterrupt(), exit_codes.INTERRUPTED),
        (None, 0),
        (SystemExit(2), exit_codes.USAGE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_programs_end_as_asr_serve_does(
    error: BaseException | None, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        if error is not None:
            raise error

    with pytest.raises(SystemExit) as end:
        run_program(main)
    assert end.value.code == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("module", ["demo_vllm", "serve_vllm", "serve_realtime_ws", "client_python"])
def test_a_wrong_flag_is_wrong_usage(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--no-such-flag"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"asr_serve.funasr.{module}", run_name="__main__")
    assert end.value.code == exit_codes.USAGE


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_client_ends_as_listen_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody listens there."""
    monkeypatch.setattr(sys, "argv", ["client_python", "--server", "ws://127.0.0.1:9", "--file", "gone.wav"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("asr_serve.funasr.client_python", run_name="__main__")
    assert end.value.code == exit_codes.FAILED
    assert capsys.readouterr().err.startswith("error: ")


def test_an_error_is_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asr_serve.funasr.demo_vllm", "--input", "none.wav", "--model", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*nothing.*\n", done.stderr)
