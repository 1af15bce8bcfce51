"""Rich transcripts: when words are said, what hotwords do, who speaks, and numbers as one writes them.

    python bench/rich.py --data DIR --words LIST --json rich.json

DIR holds `multilingual`, `two-speaker-mixes`, `librispeech-test-other` and `ami`; LIST is a pronouncing dictionary
or a word a line. Each part is a bench of its own, rich_times, rich_hotwords, rich_speakers and rich_itn, which say
what they measure and against what; here they run one after another and their reports become one. Exit code 1 when
one failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).resolve().parent
PARTS = ("times", "hotwords", "speakers", "itn")


def run(part: str, args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Its report, or what became of it."""
    wanted: dict[str, list[str]] = {
        "times": ["--data", str(args.data)],
        "hotwords": ["--data", str(args.data / "librispeech-test-other"), "--words", str(args.words)],
        "speakers": ["--data", str(args.data)],
        "itn": [],
    }
    command = [sys.executable, str(HERE / f"rich_{part}.py"), *wanted[part], "--json", str(out)]
    print(f"--- {part}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        return {"failed": f"exit {done.returncode}"}
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--words", type=Path, metavar="LIST", help="for hotwords")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAMES")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"unknown parts {', '.join(unknown)}; there are: {', '.join(PARTS)}")
    if "hotwords" in parts and args.words is None:
        parser.error("the part hotwords wants --words LIST")
    report: dict[str, Any] = {"bench": "rich", "machine": machine.describe(machine.cores())}
    with tempfile.TemporaryDirectory() as folder:
        report["parts"] = {part: run(part, args, Path(folder) / f"{part}.json") for part in parts}
    machine.tell(args.json, report)
    sys.exit(any("failed" in part for part in report["parts"].values()))


if __name__ == "__main__":
    main()
