"""Lighthouse's scores of every page of the web console, from a server that this script starts.

    npm install --prefix /tmp/lighthouse lighthouse@12
    python bench/console_lighthouse.py --lighthouse /tmp/lighthouse/node_modules/.bin/lighthouse --json scores.json

Needs Node 20 or newer and a Chromium. A page is measured as Lighthouse does by default, as a slow phone has it
(`mobile`), and as a desktop has it. The table goes to stdout; the exit code is 1 if a score is below `--least`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import machine

from asr_serve.server.console.pages import DOCS_PAGES, PAGES

CATEGORIES = ("performance", "accessibility", "best-practices", "seo")
METRICS = {
    "first_contentful_paint_ms": "first-contentful-paint",
    "largest_contentful_paint_ms": "largest-contentful-paint",
    "total_blocking_time_ms": "total-blocking-time",
    "cumulative_layout_shift": "cumulative-layout-shift",
    "bytes": "total-byte-weight",
}
START_S, PAGE_S = 120.0, 120.0


def start(log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Starts a server and waits until it is ready. Raises SystemExit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Another server may have the user's folder of batches, and this one would answer 503.
    flags = ["--port", str(port), "--set", f"batch.folder={log.parent / 'batch'}"]
    command = ["-c", "from asr_serve.api.cli import main; main()", "serve", *flags]
    with log.open("w") as out:
        server = subprocess.Popen([sys.executable, *command], stdout=out, stderr=out)
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready") as answer:
                if answer.status == 200:
                    return server, f"http://127.0.0.1:{port}"
        except OSError:
            time.sleep(0.2)
    server.kill()
    raise SystemExit(f"the server does not start:\n{log.read_text()[-2000:]}")


def measure(lighthouse: str, chromium: str, url: str, preset: str) -> dict[str, Any]:
    """Runs Lighthouse on a page. Returns scores, 0 to 100, metrics, and audits that are not passed."""
    flags = [
        "--quiet",
        "--output=json",
        f"--only-categories={','.join(CATEGORIES)}",
        "--chrome-flags=--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage",
        *(["--preset=desktop"] if preset == "desktop" else []),
    ]
    env = {**os.environ, "CHROME_PATH": chromium}
    done = subprocess.run([lighthouse, url, *flags], capture_output=True, timeout=PAGE_S, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"lighthouse failed on {url}:\n{done.stderr.decode()[-2000:]}")
    found = json.loads(done.stdout)
    scores = {name: found["categories"][name]["score"] for name in CATEGORIES}
    audits = found["audits"]
    failed = sorted(
        audit["id"]
        for category in found["categories"].values()
        for audit in (audits[reference["id"]] for reference in category["auditRefs"] if reference["weight"])
        if audit["score"] is not None and audit["score"] < 0.9
    )
    return {
        **{name: None if score is None else round(100 * score) for name, score in scores.items()},
        **{name: round(audits[audit]["numericValue"], 3) for name, audit in METRICS.items()},
        "not_passed": failed,
        "lighthouse": found["lighthouseVersion"],
    }


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--lighthouse", default=shutil.which("lighthouse"), help="its program")
    asked.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    asked.add_argument("--presets", default="mobile,desktop")
    asked.add_argument("--pages", help="paths, like /status,/docs; all, if it is left out")
    asked.add_argument("--least", type=int, default=95, help="score that every category of every page has at least")
    asked.add_argument("--json", type=Path)
    given = asked.parse_args()
    if not given.lighthouse or not given.chromium:
        raise SystemExit("a program is missing: name it with --lighthouse, --chromium")
    paths = [path for path, name in {**PAGES, **DOCS_PAGES}.items() if name.endswith(".html")]
    if given.pages:
        paths = given.pages.split(",")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        server, url = start(Path(folder) / "log")
        try:
            for path in paths:
                for preset in given.presets.split(","):
                    row = {"name": "asr-serve", "page": path, "preset": preset}
                    row |= measure(given.lighthouse, given.chromium, url + path, preset)
                    rows.append(row)
                    print(path, preset, *(f"{name} {row[name]}" for name in CATEGORIES), *row["not_passed"], flush=True)
        finally:
            server.terminate()
            server.wait(START_S)
    result = {"bench": "console_lighthouse", "machine": machine.describe(1), "rows": rows}
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    low = [row for row in rows if any((row[name] or 0) < given.least for name in CATEGORIES)]
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
