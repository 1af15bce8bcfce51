"""The JavaScript client's own tests, run by Node against a real server; and its exports beside ours."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from children import MODULE_LIMIT_S, Child

from asr_serve.text import word_timing as wording
from asr_serve.text.formats import subtitles, text_and_json
from asr_serve.types import Segment, Transcript, Word

PACKAGE = Path(__file__).resolve().parents[2] / "clients" / "js"
FILES = sorted(PACKAGE.glob("test/*.test.ts"))
WAIT_S = 300.0
"""Longer than any file's tests take; only a hang reaches it."""
EXPORT = """
import { Transcript } from "asr-serve";
let sent = "";
for await (const part of process.stdin) sent += part;
const made = JSON.parse(sent).map(({ segments, duration }) => {
  const transcript = Object.assign(new Transcript(), { segments, duration, language: "en", model: "m" });
  const karaoke = transcript.toVtt({ karaoke: true });
  return [transcript.toTxt(), transcript.toSrt(), transcript.toVtt(), karaoke, transcript.toJson()];
});
console.log(JSON.stringify(made));
"""
ODD = '"a" -->\t<b>\r\n& <c'
"""As a speaker's name."""
CUE_TIMES = re.compile(r"\d{2}:\d{2}:\d{2}\.\d{3} --> \d{2}:\d{2}:\d{2}\.\d{3}")
WORDS = [
    *["a", "I", "of", "the", "times", "wisdom", "'twas", "--", "&", "<b>", "-->", "naïve", "Größe", "3,000", "end."],
    *("東京", "東京都渋谷区の最良の時代であり最悪の時代でもあったのです", "한국어", "👍"),
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
]


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, timeout=WAIT_S, **options)
    except subprocess.TimeoutExpired as hung:
        raise AssertionError(f"{command} hangs:\n{(hung.stdout or b'').decode()[-8_000:]}") from hung


@pytest.fixture(scope="session")
def built() -> None:
    """The package and its tests are compiled."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("there is no node, or no npm")
    version = run(node, "--version").stdout
    if int(version.removeprefix("v").split(".")[0]) < 20:
        pytest.skip(f"node {version.strip()} is too old: 20 or newer")
    if not (PACKAGE / "node_modules").is_dir():
        fetched = run(npm, "ci", "--ignore-scripts")
        if fetched.returncode:
            pytest.skip(f"npm ci got no packages: {fetched.stderr[-300:]}")
    for script in ("build", "build:test"):
        compiled = run(npm, "run", "--silent", script)
        assert compiled.returncode == 0, compiled.stdout + compiled.stderr


def serve(*settings: str) -> list[str]:
    command = [sys.executable, "-c", "from asr_serve.api.cli import main; main()", "serve", "--voice", "none"]
    for setting in ("engine_threads=1", "log_level=error", *settings):
        command += ["--set", setting]
    return command


@contextmanager
def server(*settings: str) -> Iterator[str]:
    """Its address."""
    command = [*serve(*settings), "--port", "0"]
    with Child(command, stderr=subprocess.PIPE, text=True, limit_s=MODULE_LIMIT_S) as process:
        try:
            assert process.stderr
            said = ""
            while not (ready := re.search(r" on (http://\S+) \(ready", said)):
                line = process.stderr.readline()
                assert line, f"the server ended: {said}"
                said += line
            yield ready[1]
        finally:
            process.terminate()
            process.communicate(timeout=WAIT_S)


@pytest.fixture(scope="module")
def environment(built: None, packaged_speech: Path) -> Iterator[dict[str, str]]:
    """What the tests are told."""
    with server("cors_origins=*") as url, server("session_idle_s=1.5", "resume_s=1") as hasty:
        told = {"ASR_SERVE_URL": url, "ASR_SERVE_HASTY_URL": hasty, "ASR_SERVE_COMMAND": json.dumps(serve())}
        yield os.environ | told | {"ASR_SERVE_CLIP": str(packaged_speech / "two_cities.wav")}


@pytest.mark.slow
@pytest.mark.timeout(3 * WAIT_S)  # Node has its own, and says what hangs
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".test.ts"))
def test_the_tests_of_the_package_pass(path: Path, environment: dict[str, str]) -> None:
    compiled = f"build/{path.name.removesuffix('.ts')}.js"
    # Node 20 may spin for ever as it closes the sockets that the tests' network has broken: it just exits instead.
    leave = ["--test-force-exit"] if "--test-force-exit" in run("node", "--help").stdout else []
    done = run("node", "--test", *leave, "--test-reporter=spec", compiled, env=environment)
    assert done.returncode == 0, done.stdout[-8_000:] + done.stderr[-2_000:]


@pytest.mark.slow
def test_exports_are_those_of_the_server(built: None) -> None:
    roll = random.Random(5)
    counts = [count for count in (0, 1, 2, 5, 9) for _ in range(12)]
    transcripts = [made(roll, count, overlaps) for overlaps in (False, True) for count in counts]
    sent = [
        {
            "duration": each.duration_s,
            "segments": [
                {
                    "index": n,
                    "start": s.start_s,
                    "end": s.end_s,
                    "text": s.text,
                    **({"speaker": s.speaker} if s.speaker else {}),
                    **({"words": [as_sent(word) for word in s.words]} if s.words else {}),
                }
                for n, s in enumerate(each.segments)
            ],
        }
        for each in transcripts
    ]
    answer = run("node", "--input-type=module", "--eval", EXPORT, input=json.dumps(sent))
    assert answer.returncode == 0, answer.stderr
    for each, (txt, srt, vtt, karaoke, as_json) in zip(transcripts, json.loads(answer.stdout), strict=True):
        assert txt == text_and_json.text(each)
        assert srt == subtitles.srt(each)
        assert vtt == subtitles.vtt(each)
        times = [tuple(line.split(" --> ")) for line in vtt.splitlines() if CUE_TIMES.fullmatch(line)]
        assert times == sorted(times, key=lambda cue: cue[0]), "WebVTT wants cues in order of their starts"
        assert all(start < end for start, end in times)
        assert karaoke == subtitles.karaoke(each)
        ours = json.loads(text_and_json.json(each))
        del ours["key"]  # the name of a file, which a stream has not
        assert json.loads(as_json) == ours


def as_sent(word: Word) -> dict[str, Any]:
    """As a stream's event has it, in the client's names."""
    told = {"text": word.text, "start": word.start_s, "end": word.end_s, "confidence": word.confidence}
    return told | ({"speaker": word.speaker} if word.speaker else {})


def timed(roll: random.Random, text: str, start: int, end: int) -> tuple[Word, ...]:
    """Words of a text, with pauses between them."""
    parts = [text[first:behind] for first, behind in wording.split_words(text)]
    edges = sorted(roll.randrange(start, end + 1) for _ in range(2 * len(parts)))
    speakers = [roll.choice(["", "", "SPEAKER_01", ODD]) for _ in parts]
    said = zip(parts, edges[::2], edges[1::2], speakers, strict=True)
    return tuple(Word(part, first, last, 0.5, speaker) for part, first, last, speaker in said)


def made(roll: random.Random, segments: int, overlaps: bool) -> Transcript:
    """A transcript with everything that is hard to lay out: long words, wide ones, no time, control characters, and,
    if it `overlaps`, speakers who talk at once."""
    before, at, found = 0, 0, []
    for _ in range(segments):
        start = at + roll.choice([0, 1, 8, roll.randrange(50_000)])
        if overlaps and roll.random() < 0.6:
            start = roll.randrange(before, at + 1)
        before, at = start, start + roll.choice([0, 1, 24, roll.randrange(200_000)])
        text = roll.choice(["", " ", "\t\x07 "]) + " ".join(roll.choices(WORDS, k=roll.randrange(40)))
        speaker = roll.choice(["", "", "SPEAKER_00", "Ada <1>", ODD])
        words = timed(roll, text, start, at) if roll.random() < 0.5 else ()
        found.append(Segment(start, at, text, speaker=speaker, words=words))
    return Transcript(
        key="",
        text=" ".join(s.text for s in found if s.text),
        language="en",
        duration_samples=max((each.end_samples for each in found), default=0),
        segments=tuple(found),
        model="m",
    )
