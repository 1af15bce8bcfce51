"""The command as a user meets it: peak memory over a long file, and seconds to the first text."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import clips
import machine
import report
from clips import Clip

COMMAND = [sys.executable, "-c", "import sys; from asr_serve.api.cli import main; sys.exit(main())", "transcribe"]


def memory(speech: Sequence[Clip], device: str, env: dict[str, str], hours: float = 3.0) -> dict[str, Any]:
    """`asr-serve transcribe` over one long file: peak memory of its processes, speed, and what it heard."""
    from asr_serve_tools.evaluate.wer import wer

    with tempfile.TemporaryDirectory(prefix="asr-serve-bench-") as folder:
        path, heard = Path(folder, "long.flac"), Path(folder, "long.txt")
        audio_s, said = clips.write_long(path, speech, hours * 3_600)
        command = [*COMMAND, str(path), "--format", "text", "--output", str(heard), "--device", device]
        started = time.perf_counter()
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        watch = Watch(process.pid)
        _, errors = process.communicate()
        wall_s, peak_mib = time.perf_counter() - started, watch.stop()
        if process.returncode:
            return {**report.blank("asr-serve memory"), "failed": last_line(errors) or f"exit {process.returncode}"}
        rate = wer([said], [heard.read_text(encoding="utf-8")])
    return {
        "name": "asr-serve memory",
        "rtfx": round(audio_s / wall_s, 2),
        "wer": round(rate.percent, 2),
        "wall_s": round(wall_s, 2),
        "audio_s": round(audio_s, 1),
        "peak_mib": round(peak_mib),
        "device": device,
        "notes": "the whole command on one FLAC file, start and decoding included; 0.5 s pauses",
    }


def startup(speech: Clip, device: str, env: dict[str, str], repeats: int, folder: Path) -> list[dict[str, Any]]:
    """Seconds from starting the command to its first line of text, for one clip.

    Cold: an empty weights cache, so the package's weights are converted first. Warm: every start after it.
    """
    path = folder / "one.flac"
    audio_s, _ = clips.write_long(path, [speech], 1e-3)
    with tempfile.TemporaryDirectory(prefix="asr-serve-bench-") as cache:
        env = {**env, "ASR_SERVE_CACHE": cache}
        command = [*COMMAND, str(path), "--format", "text", "--device", device]
        runs = [first_line(command, env) for _ in range(repeats + 1)]
    rows: list[dict[str, Any]] = []
    for name, some in (("cold", runs[:1]), ("warm", runs[1:])):
        failed = next((why for _, _, why in some if why), None)
        made = {"name": f"asr-serve startup {name}", "rtfx": None, "wer": None, "wall_s": None, "audio_s": audio_s}
        if failed:
            rows.append({**made, "failed": failed})
            continue
        first_s, wall_s = (statistics.median(column) for column in list(zip(*some, strict=True))[:2])
        made.update(first_text_s=round(first_s, 2), wall_s=round(wall_s, 2), rtfx=round(audio_s / wall_s, 2))
        rows.append({**made, "device": device, "notes": "process start to first text and to exit, one clip"})
    return rows


def first_line(command: list[str], env: dict[str, str]) -> tuple[float, float, str | None]:
    """Seconds to the first line with something in it, seconds to the end, and why it failed if it did."""
    started, first_s = time.perf_counter(), None
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if first_s is None and line.strip():
                    first_s = time.perf_counter() - started
        code, wall_s = process.returncode, time.perf_counter() - started
        errors.seek(0)
        if code or first_s is None:
            return 0.0, wall_s, last_line(errors.read()) or f"exit {code}, no text"
    return first_s, wall_s, None


class Watch:
    """Peak memory of a process and all it starts: the sum of each one's high-water mark."""

    def __init__(self, pid: int) -> None:
        self.pid, self.peaks, self.ended = pid, dict[int, float](), threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)
        self.thread.start()

    def look(self) -> None:
        while not self.ended.wait(0.05):
            for pid in family(self.pid):
                self.peaks[pid] = max(self.peaks.get(pid, 0.0), machine.peak_mib(str(pid)))

    def stop(self) -> float:
        self.ended.set()
        self.thread.join()
        return sum(self.peaks.values())


def family(pid: int) -> list[int]:
    """The process and its descendants."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        children = " ".join(Path(f"/proc/{pid}/task/{task}/children").read_text() for task in tasks)
    except OSError:  # gone since, or no /proc
        return [pid]
    return [pid, *(deeper for child in children.split() for deeper in family(int(child)))]


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
