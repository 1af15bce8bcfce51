"""`asr-serve serve`: collects settings from all sources, then runs the server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from asr_serve.api.cli.exit_codes import exit_on_error, print_error
from asr_serve.api.cli.options import settings
from asr_serve.config import ServeConfig, client_key, environment
from asr_serve.config_sources import SettingValue, all_settings, build_config, collect_values, config_to_toml
from asr_serve.errors import OptionError
from asr_serve.types import SECRETS, is_loopback

FLAGS = {
    "--host": "host",
    "--port": "port",
    "--realtime-port": "realtime_port",
    "--wyoming-port": "wyoming_port",
    "--riva-port": "riva_port",
    "--model": "model",
    "--pipeline": "pipeline",
    "--voice": "voice",
    "--alias": "aliases",
    "--device": "device",
    "--dtype": "dtype",
    "--quantize": "engine.quantize",
    "--tensor-parallel-size": "engine.tensor_parallel_size",
    "--weights": "weights",
    "--role": "engine.role",
    "--peer": "engine.peers",
    "--encode-port": "encode_port",
    "--api-key": "api_keys",
    "--admin-key": "admin_keys",
    "--max-concurrent": "max_concurrent",
    "--log-format": "log_format",
    "--otel-endpoint": "otel_endpoint",
}
"""Setting of each flag. All other settings are set by --set."""


def flag(name: str, *short: str, metavar: str, more: str = "") -> Any:
    """Option with the help and default of its setting. Its value is validated with those of the other sources."""
    setting = all_settings()[FLAGS[name]]
    parts = [setting.help, more]
    if setting.default not in (None, (), {}):
        parts.append(f"Default: {setting.default}.")
    return typer.Option(name, *short, metavar=metavar, help=" ".join(filter(None, parts)))


@exit_on_error
def serve(
    host: Annotated[str | None, flag("--host", metavar="ADDRESS")] = None,
    port: Annotated[str | None, flag("--port", "-p", metavar="PORT")] = None,
    realtime_port: Annotated[str | None, flag("--realtime-port", metavar="PORT")] = None,
    wyoming_port: Annotated[str | None, flag("--wyoming-port", metavar="PORT")] = None,
    riva_port: Annotated[str | None, flag("--riva-port", metavar="PORT")] = None,
    model: Annotated[
        list[str] | None, flag("--model", "-m", metavar="NAME", more="Repeat it to load further models.")
    ] = None,
    pipeline: Annotated[str | None, flag("--pipeline", metavar="NAME|FILE")] = None,
    voice: Annotated[str | None, flag("--voice", metavar="NAME|none")] = None,
    alias: Annotated[list[str] | None, flag("--alias", metavar="NAME=MODEL", more="May be repeated.")] = None,
    device: Annotated[str | None, flag("--device", metavar="DEVICE")] = None,
    dtype: Annotated[str | None, flag("--dtype", metavar="DTYPE")] = None,
    quantize: Annotated[str | None, flag("--quantize", metavar="auto|none|int8|dynamic")] = None,
    tensor_parallel_size: Annotated[str | None, flag("--tensor-parallel-size", metavar="N")] = None,
    weights: Annotated[str | None, flag("--weights", metavar="DIR")] = None,
    role: Annotated[str | None, flag("--role", metavar="both|encode|decode")] = None,
    peer: Annotated[
        list[str] | None, flag("--peer", metavar="HOST:PORT", more="May be repeated; PORT is their encode_port.")
    ] = None,
    encode_port: Annotated[str | None, flag("--encode-port", metavar="PORT")] = None,
    api_key: Annotated[
        list[str] | None,
        flag(
            "--api-key",
            metavar="KEY",
            more="May be repeated. Flags are visible to all users of this machine; safer are "
            "ASR_SERVE_API_KEYS and api_keys_file.",
        ),
    ] = None,
    admin_key: Annotated[
        list[str] | None, flag("--admin-key", metavar="KEY", more="May be repeated; see --api-key.")
    ] = None,
    max_concurrent: Annotated[str | None, flag("--max-concurrent", metavar="N")] = None,
    log_format: Annotated[str | None, flag("--log-format", metavar="text|json")] = None,
    otel_endpoint: Annotated[str | None, flag("--otel-endpoint", metavar="URL")] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", metavar="FILE", help="TOML file of settings. Default: ASR_SERVE_CONFIG."),
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Setting by name, like engine.max_decode_rows=32. May be repeated."
        ),
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config", help="Print every setting with its meaning and the source of its value, and exit."
        ),
    ] = False,
) -> None:
    """Serve speech recognition and synthesis over HTTP and WebSocket, for OpenAI's clients among others.

    It runs until ctrl-C or SIGTERM. Settings come from a file (--config), then
    from variables (ASR_SERVE_PORT, ASR_SERVE_ENGINE__MAX_DECODE_ROWS), then from
    flags; each source overrides the ones before it.

    \b
    Exit code  0 stopped by a signal, 1 something failed, 2 a setting is wrong

    \b
    Examples
      asr-serve serve
      asr-serve serve --realtime-port 10095
      asr-serve serve --pipeline chain-then-whisper
      asr-serve serve --port 9000 --alias whisper-1=moonshine-tiny-en
      ASR_SERVE_API_KEYS=secret asr-serve serve --host 0.0.0.0
      asr-serve serve --set max_duration_s=600 --set engine.max_decode_rows=32
      asr-serve serve --print-config > asr-serve.toml
      asr-serve serve --config asr-serve.toml

    \b
    On several machines, or in several processes of one machine: audio is
    encoded by a peer with capacity; if a peer fails, another one takes over
      asr-serve serve --role encode --port 8001 --encode-port 8101
      asr-serve serve --role encode --port 8002 --encode-port 8102
      asr-serve serve --role decode --peer 127.0.0.1:8101 --peer 127.0.0.1:8102
    From elsewhere: --host 0.0.0.0 and the same ASR_SERVE_PEER_KEYS for all

    \b
    Requests, from any machine that can reach the server
      curl http://127.0.0.1:8000/v1/audio/transcriptions \\
        -F file=@talk.mp3 -F model=moonshine-tiny-en
      curl http://127.0.0.1:8000/health
    """
    flags = read_flags(
        {
            "--host": host,
            "--port": port,
            "--realtime-port": realtime_port,
            "--wyoming-port": wyoming_port,
            "--riva-port": riva_port,
            "--pipeline": pipeline,
            "--voice": voice,
            "--alias": alias,
            "--device": device,
            "--dtype": dtype,
            "--quantize": quantize,
            "--tensor-parallel-size": tensor_parallel_size,
            "--weights": weights,
            "--role": role,
            "--peer": peer,
            "--encode-port": encode_port,
            "--api-key": api_key,
            "--admin-key": admin_key,
            "--max-concurrent": max_concurrent,
            "--log-format": log_format,
            "--otel-endpoint": otel_endpoint,
        },
        model or [],
        more or [],
    )
    given = with_first_model(collect_values(config, environment(), flags))
    chosen = build_config(given)
    if print_config:
        print(config_to_toml(chosen, given), end="")
        return
    for line in setting_warnings(chosen, given):
        print_error(f"warning: {line}")

    from asr_serve.server.run import serve as run  # loads FastAPI and its packages, only to start a server

    run(chosen)


def read_flags(flags: dict[str, str | list[str] | None], models: list[str], more: list[str]) -> dict[str, SettingValue]:
    """Maps settings to texts, from the flags and the NAME=VALUE of --set. The first model is the default. Raises
    OptionError for a setting that is set twice."""
    given: dict[str, SettingValue] = {}
    for name, value in flags.items():
        if value is not None and value != []:
            text = value if isinstance(value, str) else ",".join(value)
            given[FLAGS[name]] = SettingValue(text, f"flag {name}")
    if models:
        given["model"] = SettingValue(models[0], "flag --model")
    if models[1:]:
        given["more_models"] = SettingValue(tuple(models[1:]), "flag --model")
    set_by_name = settings(more)
    for name in set_by_name.keys() & given.keys():
        raise OptionError(f"{name} is set twice: by {given[name].source} and by flag --set", "once is allowed")
    return given | set_by_name


def with_first_model(given: dict[str, SettingValue]) -> dict[str, SettingValue]:
    """Adds the first model of the pipeline as the default model, where none is set. Raises OptionError with the line
    and the key of what is wrong in the pipeline's file, SourceNotFound."""
    pipeline = given.get("pipeline")
    if pipeline is None or not isinstance(pipeline.value, str):  # of another type, it is refused with all settings
        return given
    from asr_serve.pipelines.stages.pipeline_file import open_pipeline

    first = open_pipeline(pipeline.value).recognizers[0]
    return {"model": SettingValue(first.model, f"the first stage of {pipeline.value}")} | given


def setting_warnings(chosen: ServeConfig, given: dict[str, SettingValue]) -> list[str]:
    """Returns warnings for an operator, before the server starts."""
    warnings = [
        f"{name} is visible to all users of this machine in the list of processes; "
        f"use {all_settings()[name].variable} or {name}_file instead"
        for name in SECRETS
        if name in given and given[name].source.startswith("flag")
    ]
    if client_key() and not chosen.api_keys:
        warnings.append("ASR_SERVE_API_KEY is the key of a client; a server checks ASR_SERVE_API_KEYS")
    if not chosen.loopback and not chosen.api_keys:
        warnings.append(
            f"listening on {chosen.host} without API keys: everybody who can reach this machine may use it; "
            "set api_keys or api_keys_file"
        )
    if chosen.engine.role == "decode" and not chosen.engine.peers:
        warnings.append("role=decode without peers: this engine encodes everything itself; name peers with --peer")
    if chosen.engine.role == "encode" and not chosen.loopback and not chosen.peer_keys:
        warnings.append(
            f"encoding for others on {chosen.host}:{chosen.encode_port} without keys: everybody who can reach this "
            "machine may request it; set peer_keys or peer_keys_file"
        )
    return warnings + _about_peers(chosen, given)


def _about_peers(chosen: ServeConfig, given: dict[str, SettingValue]) -> list[str]:
    """Warnings about audio sent to peers without keys, and about settings that do nothing without peers."""
    warnings = []
    remote = [peer for peer in chosen.engine.peers if not is_loopback(peer.rpartition(":")[0].strip("[]"))]
    if remote and not chosen.peer_keys:
        warnings.append(
            f"audio of callers is sent to {', '.join(remote)} without authentication of the "
            "peers; set peer_keys or peer_keys_file, the same there"
        )
    if _is_explicit("encode_port", chosen.encode_port, given) and chosen.engine.role != "encode":
        warnings.append(
            f"encode_port={chosen.encode_port} has no effect with role={chosen.engine.role}, only with role=encode"
        )
    if not chosen.engine.peers and chosen.engine.role != "encode":
        has_peer_transport = _is_explicit("engine.peer_transport", chosen.engine.peer_transport, given)
        unused = ["peer_keys"] * bool(chosen.peer_keys) + ["engine.peer_transport"] * has_peer_transport
        warnings += [
            f"{name} has no effect without peers: name peers with --peer, or set role=encode" for name in unused
        ]
    return warnings


def _is_explicit(name: str, value: object, given: dict[str, SettingValue]) -> bool:
    """Returns whether a setting was chosen: a file from --print-config sets every setting, most of them to their
    defaults."""
    if name not in given:
        return False
    return value != all_settings()[name].default or not given[name].source.startswith("file")
