"""baresip, a real telephone, on 127.0.0.1: it calls, plays a file, presses keys and records what it hears."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from children import Child
from running_server import WAIT_S

MODULES = Path("/usr/lib/baresip/modules")


def free_ports(count: int) -> list[int]:
    """Even ports that were free a moment ago, for datagrams and for connections."""
    ports: list[int] = []
    while len(ports) < count:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as packets, socket.socket() as connections:
            packets.bind(("127.0.0.1", 0))
            port = packets.getsockname()[1]
            with contextlib.suppress(OSError):
                connections.bind(("127.0.0.1", port))
                if port % 2 == 0 and port not in ports:
                    ports.append(port)
    return ports


class Baresip:
    """A telephone that plays `wav` while it is in a call. Its folder has what it heard: dump-*-dec.wav."""

    def __init__(self, folder: Path, wav: Path, *, codec: str = "pcmu", secure: bool = False) -> None:
        program = shutil.which("baresip")
        if program is None or not MODULES.is_dir():
            pytest.skip("no baresip: apt install baresip-core")
        self.folder = folder
        folder.mkdir()
        sip, control, media = free_ports(3)
        self.sip_port = sip
        modules = (
            codec if codec in ("g722", "opus") else "g711",
            "aufile",
            "aubridge",
            "srtp",
            "sndfile",
            "ctrl_tcp",
            "menu",
        )
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
        security = ";mediaenc=srtp-mand" if secure else ""
        codecs = f";audio_codecs={codec}" if codec in ("pcmu", "pcma") else ""
        (folder / "accounts").write_text(f"<sip:ann@127.0.0.1:{sip}>;regint=0;answermode=auto{codecs}{security}\n")
        self._control: socket.socket | None = None
        self._log = (folder / "log").open("w")
        self.process = Child(
            [program, "-4", "-f", str(folder), "-v"], stdin=subprocess.PIPE, stdout=self._log, stderr=self._log
        )
        try:
            self._control = self._connect(control)
        except BaseException:
            self.close()
            raise

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
        assert self._control is not None
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
        if self._control is not None:
            self._control.close()
        self._log.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
