"""What tests rely on when they start processes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from children import Child

WAIT_S = 60.0
TESTS = Path(__file__).parent
IGNORES = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""
BACKGROUND = """
import signal, subprocess, sys
sys.path.insert(0, sys.argv[1])
from children import restore_sigint
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
restore_sigint()
asked = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
sys.stdout.write(subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=60).stdout)
"""
WITHOUT_LIMIT = re.compile(
    r"subprocess\.Popen\(|\.communicate\(\)|^\s*[\w.]+\.join\(\)|process\.wait\(\)|future\.result\(\)", re.MULTILINE
)


def test_children_of_a_background_shell_hear_sigint():
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", BACKGROUND, str(TESTS)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert told.stdout == "True\n"


def test_a_child_that_ignores_signals_ends_at_its_limit():
    began_s = time.monotonic()
    with Child([sys.executable, "-c", IGNORES], stdout=subprocess.PIPE, limit_s=1.0) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"deaf\n"
        child.send_signal(signal.SIGINT)
    assert child.returncode == -signal.SIGKILL
    assert time.monotonic() - began_s < WAIT_S


def test_no_test_waits_without_a_limit():
    found = [
        f"{path.relative_to(TESTS)}: {match[0].strip()}"
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__)
        for match in WITHOUT_LIMIT.finditer(path.read_text())
    ]
    assert found == []
