"""sipp, a real SIP test tool, on 127.0.0.1: scenarios of messages that it sends and expects."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from baresip import free_ports
from children import Child
from running_server import WAIT_S

HEAD = """Via: SIP/2.0/[transport] [local_ip]:[local_port];branch=[branch]
From: sipp <sip:sipp@[local_ip]:[local_port]>;tag=[pid]T[call_number]
To: <sip:asr@[remote_ip]:[remote_port]>[peer_tag_param]
Call-ID: [call_id]
Contact: <sip:sipp@[local_ip]:[local_port];transport=[transport]>
Max-Forwards: 70
"""
SDP = """v=0
o=sipp 1 1 IN IP[local_ip_type] [local_ip]
s=-
c=IN IP[local_ip_type] [local_ip]
t=0 0
m=audio [auto_media_port] RTP/AVP {types}
a=rtpmap:8 PCMA/8000
a={direction}
"""


def send(method: str, number: int = 1, *headers: str, body: str = "", retransmits: bool = True) -> str:
    """A request to the other side."""
    lines = HEAD + f"CSeq: {number} {method}\n" + "".join(f"{line}\n" for line in headers)
    if body:
        lines += "Content-Type: application/sdp\n"
    text = f"{method} sip:asr@[remote_ip]:[remote_port] SIP/2.0\n{lines}Content-Length: [len]\n\n{body}"
    retrans = ' retrans="500"' if retransmits else ""
    return f"<send{retrans}><![CDATA[\n{text}\n]]></send>"


def fresh(request: str) -> str:
    """The same request outside any dialog."""
    return request.replace("[peer_tag_param]", "")


def respond(status: str, *headers: str, actions: str = "") -> str:
    """A response to what came last."""
    copied = "[last_Via:]\n[last_From:]\n[last_To:];tag=[pid]R[call_number]\n[last_Call-ID:]\n[last_CSeq:]\n"
    lines = copied + "".join(f"{line}\n" for line in headers)
    return f"<send><![CDATA[\nSIP/2.0 {status}\n{lines}Content-Length: 0\n\n]]>{actions}</send>"


def receive(what: str | int, *, optional: bool = False, auth: bool = False, action: str = "") -> str:
    """A request of a method, or a response of a status, that must come."""
    kind = f'response="{what}"' if isinstance(what, int) else f'request="{what}"'
    extra = ' optional="true"' * optional + ' auth="true"' * auth
    inner = f"<action>{action}</action>" if action else ""
    return f'<recv {kind}{extra} rtd="true">{inner}</recv>'


def pause(milliseconds: int) -> str:
    return f'<pause milliseconds="{milliseconds}"/>'


def offer(direction: str = "sendrecv", types: str = "8") -> str:
    return SDP.format(direction=direction, types=types)


ACK = send("ACK", retransmits=False)
INVITE = send("INVITE", body=offer())
OK_TO_BYE = respond("200 OK")


class Sipp:
    """sipp in a scenario. It ends by itself."""

    def __init__(
        self, folder: Path, port: int | None, *steps: str, calls: int = 1, flags: tuple[str, ...] = ()
    ) -> None:
        """`port`: of the other side; None: it waits for what comes to `self.port`."""
        program = shutil.which("sipp")
        if program is None:
            pytest.skip("no sipp: apt install sip-tester")
        folder.mkdir()
        scenario = folder / "scenario.xml"
        scenario.write_text('<?xml version="1.0"?>\n<scenario name="s">\n' + "\n".join(steps) + "\n</scenario>\n")
        self._folder = folder
        self.port, media = free_ports(2)
        target = [] if port is None else [f"127.0.0.1:{port}"]
        command = [program, *target, "-sf", str(scenario), "-i", "127.0.0.1", "-p", str(self.port), "-m", str(calls)]
        command += ["-l", str(calls), "-r", "20", "-mp", str(media), "-nostdin", "-timeout", "30"]
        command += ["-timeout_error", "-trace_msg", "-message_file", str(folder / "messages"), *flags]
        command += ["-trace_err", "-error_file", str(folder / "errors")]
        self._out = (folder / "out").open("w")
        self.process = Child(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._out, limit_s=WAIT_S
        )

    def messages(self) -> str:
        file = self._folder / "messages"
        return file.read_text(errors="replace").replace("\r", "") if file.is_file() else ""

    def finish(self) -> str:
        """Waits for the end of the scenario, which must be as it was written; returns all messages."""
        code = self.process.wait(WAIT_S)
        self._out.close()
        errors = self._folder / "errors"
        told = errors.read_text(errors="replace") if errors.is_file() else ""
        assert code == 0, f"{code}\n{told}\n{self.messages()[-6_000:]}\n{(self._folder / 'out').read_text()[-1_000:]}"
        return self.messages()
