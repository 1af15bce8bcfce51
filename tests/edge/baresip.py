"""baresip, a real telephone, on 127.0.0.1: it calls, plays a file, presses keys and records what it hears."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from children import Child
from running_server import WAIT_S

MODULES = Path("/usr/lib/baresip/modules")


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    probes = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Baresip:
    """A telephone that plays `wav` while it is in a call. Its folder has what it heard: dump-*-dec.wav."""

    def __init__(self, folder: Path, wav: Path, *, codec: str = "pcmu", account: str = "") -> None:
        program = shutil.which("baresip")
        if program is None or not MODULES.is_dir():
            pytest.skip("no baresip: apt install baresip-core")
        self.folder = folder
        folder.mkdir()
        sip, control, media = free_ports(3)
        media -= media % 2
        modules = ("g711", "g722", "opus", "aufile", "aubridge", "sndfile", "ctrl_tcp", "menu")
        lines = [f"module {name}.so" for name in modules if name not in ("ctrl_tcp", "menu")]
        lines += ["module_app ctrl_tcp.so", "module_app menu.so", "module_tmp account.so"]
        (folder / "config").write_text(
            "\n".join(
                [
                    f"module_path {MODULES}",
                    f"sip_listen 127.0.0.1:{sip}",
                    *lines,
                    f"audio_source aufile,{wav}",
                    "audio_player aubridge,nobody",
                    "audio_alert aubridge,nobody",
                    "ausrc_srate 16000",
                    "ausrc_channels 1",
                    f"snd_path {folder}",
                    f"rtp_ports {media}-{media + 20}",
                    "rtcp_mux no",
                    f"ctrl_tcp_listen 127.0.0.1:{control}",
                    "jitter_buffer_delay 1-5",
                    "net_interface 127.0.0.1",
                    "",
                ]
            )
        )
        (folder / "accounts").write_text(
            account or f"<sip:ann@127.0.0.1:{sip}>;regint=0;audio_codecs={codec};answermode=auto\n"
        )
        self._log = (folder / "log").open("w")
        self.process = Child(
            [program, "-4", "-f", str(folder), "-v"], stdin=subprocess.PIPE, stdout=self._log, stderr=self._log
        )
        self._answers: list[dict[str, Any]] = []
        self._control = self._connect(control)

    def _connect(self, port: int) -> socket.socket:
        end_s = time.monotonic() + WAIT_S
        while True:
            try:
                return socket.create_connection(("127.0.0.1", port), WAIT_S)
            except OSError:
                assert self.process.poll() is None, self.said()
                assert time.monotonic() < end_s, self.said()
                time.sleep(0.02)

    def command(self, name: str, params: str = "") -> None:
        """Gives a command of its menu. Digits are commands too."""
        text = json.dumps({"command": name, "params": params}).encode()
        self._control.sendall(b"%d:%s," % (len(text), text))

    def dial(self, uri: str) -> None:
        self.command("dial", uri)

    def said(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def says(self, pattern: str) -> bool:
        return re.search(pattern, self.said()) is not None

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(WAIT_S)
        self._control.close()
        self._log.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
