"""`asr-serve edge`: takes RTP from telephones and browsers, and sends its audio to a server."""

from __future__ import annotations

from typing import Annotated

import typer

from asr_serve.api.cli.exit_codes import exit_on_error
from asr_serve.errors import OptionError


@exit_on_error
def edge(
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Server that recognizes the speech.", show_default="http://127.0.0.1:8000"),
    ] = None,
    uplink: Annotated[
        str | None,
        typer.Option(
            metavar="websocket|http2",
            help="A connection for each session, or shared ones; http2 needs the extra edge.",
            show_default="websocket",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Hand audio to the engine of a server on this host that has this edge_folder.",
            show_default="none: --server is used",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address of this machine for RTP.", show_default="127.0.0.1")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", "-p", metavar="PORT", help="UDP port for RTP; 0 takes any.", show_default="5004"),
    ] = None,
    driver: Annotated[
        str | None,
        typer.Option(
            metavar="auto|af_xdp|recvmmsg",
            help="How packets are received. auto: AF_XDP with --interface where the host allows it, else recvmmsg.",
            show_default="auto",
        ),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Network interface for AF_XDP, which passes the host's firewall by.",
            show_default="none: no AF_XDP",
        ),
    ] = None,
    control_host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Address for control, results, metrics.", show_default="127.0.0.1"),
    ] = None,
    control_port: Annotated[
        int | None, typer.Option(metavar="PORT", help="TCP port for them; 0 takes any.", show_default="8004")
    ] = None,
    webhook: Annotated[
        str | None, typer.Option(metavar="URL", help="URL that events are posted to, as JSON.", show_default="none")
    ] = None,
    payload_type: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE=FORMAT",
            help="Dynamic payload type, like 96=opus/48000/2. May be repeated; replaces the defaults.",
            show_default="96=opus/48000/2, 97=L16/16000, 101=telephone-event/8000",
        ),
    ] = None,
    voice_activity: Annotated[
        bool | None,
        typer.Option(
            "--voice-activity/--no-voice-activity",
            help="Find silence here, and send its length only; needs the extra edge.",
            show_default="off",
        ),
    ] = None,
    sip: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Answer telephone calls by SIP at this address.",
            show_default="none are answered",
        ),
    ] = None,
    sip_allow: Annotated[
        list[str] | None,
        typer.Option(metavar="NETWORK", help="Network that may call. May be repeated.", show_default="the registrar"),
    ] = None,
    sip_register: Annotated[
        str | None,
        typer.Option(
            metavar="sip:USER@HOST", help="Account at an exchange, whose calls are answered.", show_default="none"
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", "-c", metavar="FILE", help="TOML file of settings; flags override it.")
    ] = None,
) -> None:
    """Take RTP from telephone networks and browsers, and send it to a server.

    A session is created over HTTP; its answer names an SSRC for the sender.
    Instead of that, a session may expect a source, an address with or without
    a port. Packets that no session expects are dropped and counted.

    \b
    Formats    G.711 (PCMU, PCMA), G.722, L16, Opus with its forward error
               correction; comfort noise and telephone keys are understood
    Packets    in any order, late, twice or not at all: what does not arrive
               within 200 ms is concealed, and told with its position
    Server     if it is away for up to two minutes (spool_s), no audio is lost;
               if it has been restarted, open segments are recognized again
    Results    as server-sent events, by WebSocket, and posted to --webhook
    Keys       ASR_SERVE_API_KEY is sent to the server; api_keys in the file
               are those of the control API, required beyond this machine

    \b
    Exit code  0 stopped by a signal, 1 something failed, 2 wrong usage

    \b
    Examples
      asr-serve serve &
      asr-serve edge
      curl http://127.0.0.1:8004/v1/edge/sessions -H 'Content-Type: application/json' -d '{}'
      ffmpeg -re -i talk.wav -ac 1 -ar 8000 -c:a pcm_mulaw -ssrc SSRC \\
        -f rtp rtp://127.0.0.1:5004
      curl -N http://127.0.0.1:8004/v1/edge/sessions/ID/events
      curl -X DELETE http://127.0.0.1:8004/v1/edge/sessions/ID

    \b
    A telephone gateway that chooses its SSRC itself
      curl http://127.0.0.1:8004/v1/edge/sessions \\
        -H 'Content-Type: application/json' -d '{"source":"10.0.0.7:20000","options":{"language":"en"}}'

    \b
    Packets past the kernel (AF_XDP); what it needs: asr-serve doctor --edge
      asr-serve edge --host 10.0.0.2 --driver af_xdp --interface eth0

    \b
    Telephone calls (docs/telephone.md); the password of the account is in
    ASR_SERVE_SIP_PASSWORD
      asr-serve edge --host 10.0.0.5 --sip 10.0.0.5:5060 \\
        --sip-register sip:7001@10.0.0.7
      curl -N http://127.0.0.1:8004/v1/edge/calls/events

    \b
    A file of settings (docs/edge.md)
      server = "https://asr.example.org"
      host = "0.0.0.0"
      webhook = "https://crm.example.org/words"
      options = {language = "en", words = true}
    """
    from asr_serve.edge.edge_config import load_edge_config
    from asr_serve.edge.run import run_edge

    types = None if payload_type is None else dict(_parse_type(text) for text in payload_type)
    flags = {"server": server, "host": host, "port": port, "driver": driver, "interface": interface}
    flags |= {"control_host": control_host, "control_port": control_port, "uplink": uplink, "engine": engine}
    table = {**_parse_sip(sip), **_parse_account(sip_register), **({"allow": sip_allow} if sip_allow else {})}
    run_edge(
        load_edge_config(
            config,
            {**flags, "webhook": webhook, "payload_types": types, "voice_activity": voice_activity, "sip": table},
        )
    )


def _parse_sip(text: str | None) -> dict[str, object]:
    """Reads HOST, HOST:PORT, [IPv6] or [IPv6]:PORT."""
    if text is None:
        return {}
    host, _, port = text.rpartition(":") if "]:" in text or text.count(":") == 1 else (text, "", "5060")
    if not (port.isascii() and port.isdigit()):
        raise OptionError(f"--sip {text[:60]}", "HOST or HOST:PORT", "like 10.0.0.5:5060")
    return {"host": host.strip("[]"), "port": int(port)}


def _parse_account(text: str | None) -> dict[str, object]:
    """Reads sip:USER@HOST, with a port and a transport."""
    if text is None:
        return {}
    scheme, colon, rest = text.partition(":")
    user, at, place = rest.rpartition("@")
    if not (colon and at and user and place):
        raise OptionError(f"--sip-register {text[:60]}", "sip:USER@HOST", "like sip:7001@pbx.example.org;transport=tcp")
    return {"user": user, "registrar": f"{scheme}:{place}"}


def _parse_type(text: str) -> tuple[str, str]:
    kind, found, form = text.partition("=")
    if not found:
        raise OptionError(f"--payload-type {text[:60]}", "TYPE=FORMAT", "like 96=opus/48000/2")
    return kind, form
