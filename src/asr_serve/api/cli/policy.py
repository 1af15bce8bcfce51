"""`asr-serve policy`: checks a policy of models, promotes and rolls back by it, reads and verifies its audit log."""

from __future__ import annotations

import json
import os
import pwd
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from asr_serve.api.cli.exit_codes import FAILED, exit_on_error, print_error
from asr_serve.api.cli.models import as_text, print_table
from asr_serve.api.cli.options import AsJson
from asr_serve.config import client_key

app = typer.Typer(no_args_is_help=True, help="Which models serve whom: check a policy, promote, roll back, audit.")

SERVER = "http://127.0.0.1:8000"

PolicyFile = Annotated[Path, typer.Argument(metavar="FILE", help="Policy file, in TOML.", show_default=False)]
LogFile = Annotated[Path, typer.Argument(metavar="LOG", help="Audit log of a server.", show_default=False)]
Route = Annotated[str, typer.Argument(help="Name of a route of the policy.", show_default=False)]
Server = Annotated[str, typer.Option(metavar="URL", help="Server whose models are governed.")]
AdminKey = Annotated[
    str | None, typer.Option("--api-key", metavar="KEY", help="Admin key; safer in the variable ASR_SERVE_API_KEY.")
]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Reason, for the audit log.", show_default=False)]


@app.command("check")
@exit_on_error
def check(
    file: PolicyFile,
    evaluations: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of asr-serve eval. Default: the evidence is not checked.")
    ] = None,
    region: Annotated[str | None, typer.Option(metavar="NAME", help="Region of the server, for residency.")] = None,
    quantize: Annotated[
        str,
        typer.Option(
            metavar="auto|none|int8|dynamic",
            help="Quantization of the models on the server, as /v1/models tells: auto only where 8 bits are faster.",
        ),
    ] = "auto",
) -> int:
    """Check a policy file, and whether its models have shown what it requires.

    Exit code 1: a model does not meet a requirement.

    \b
    Examples
      asr-serve policy check policy.toml
      asr-serve policy check policy.toml --evaluations evaluations.sqlite
    """
    from asr_serve.governance.evidence import GovernedModel, check_evidence, check_standing
    from asr_serve.governance.governor import find_evaluations
    from asr_serve.governance.policy import read_policy
    from asr_serve.models.registry import asr_card

    policy = read_policy(file)
    refused = False
    for route in policy.routes.values():
        for name in route.models:
            card = asr_card(name)
            model = GovernedModel(name, card.weights_revision, card.licence, card.quantization(quantize))
            refusals = list(check_standing(route.requires, model, region))
            if evaluations is not None and name == route.candidate:
                decision = check_evidence(route.requires, model, find_evaluations(evaluations, name), time.time())
                refusals += decision.refusals
            refused |= bool(refusals)
            role = "candidate" if name == route.candidate else "stable"
            unchecked = ", its evaluations not looked at (--evaluations FILE)"
            said = "refused" if refusals else "ok" + (unchecked if role == "candidate" and evaluations is None else "")
            print(f"{route.name}: {role} {name}: {said}")
            for each in refusals:
                print(f"  {each}")
    return FAILED if refused else 0


@app.command("status")
@exit_on_error
def status(server: Server = SERVER, api_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Show the stage of every route of a server, and what its candidate lacks.

    \b
    Example
      asr-serve policy status --server http://127.0.0.1:8000
    """
    found = _ask(server, api_key, "GET", "/v1/policy")
    if as_json:
        print(as_text(found))
        return
    columns = ("ROUTE", "STAGE", "NEXT", "STABLE", "CANDIDATE", "SINCE", "BY")
    names = ("name", "stage", "next_stage", "stable", "candidate", "since_utc", "by")
    print_table(columns, [tuple(str(route[name] or "-") for name in names) for route in found["routes"]])
    for route in found["routes"]:
        for each in route["blocked_by"]:
            print_error(f"{route['name']}: {each}")
    print_error(f"digest of the last line of the audit log: {found['audit_head']}")


@app.command("promote")
@exit_on_error
def promote(
    route: Route,
    reason: Reason = "",
    to: Annotated[
        str | None, typer.Option(metavar="STAGE", help="Stage that must be the next one: shadow, canary or promoted.")
    ] = None,
    server: Server = SERVER,
    api_key: AdminKey = None,
) -> None:
    """Bring the candidate of a route to its next stage, if it has shown what the policy requires.

    \b
    Example
      asr-serve policy promote default --to canary --reason "2 % better on calls"
    """
    body = {"reason": reason, "operator": _operator(), "to": to}
    found = _ask(server, api_key, "POST", f"/v1/policy/{quote(route, safe='')}/promote", body)
    print(f"{found['candidate']} is {found['stage']} on route {route}")


@app.command("rollback")
@exit_on_error
def rollback(route: Route, reason: Reason = "", server: Server = SERVER, api_key: AdminKey = None) -> None:
    """Take the candidate of a route back: new callers get the stable model at once.

    Sessions in progress keep their model, and lose nothing.

    \b
    Example
      asr-serve policy rollback default --reason "callers complain"
    """
    body = {"reason": reason, "operator": _operator()}
    found = _ask(server, api_key, "POST", f"/v1/policy/{quote(route, safe='')}/rollback", body)
    print(f"{found['candidate']} is rolled back on route {route}: {found['stable']} serves it")


@app.command("log")
@exit_on_error
def show_log(
    log: LogFile,
    route: Annotated[str | None, typer.Option(metavar="NAME", help="Route whose changes are shown.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show an audit log: what was changed, when, by whom, and on which evidence.

    \b
    Example
      asr-serve policy log audit.jsonl --route default
    """
    from asr_serve.governance.audit_log import verify_log

    entries = [entry for entry in verify_log(log).entries if route in (None, entry.route)]
    if as_json:
        print(as_text(entries))
        return
    columns = ("LINE", "TIME", "ROUTE", "ACTION", "STAGE", "CANDIDATE", "BY", "EVIDENCE", "REASON")
    rows: list[tuple[str, ...]] = [
        (
            str(entry.number),
            entry.at_utc,
            entry.route,
            entry.action,
            entry.stage,
            entry.candidate or "-",
            f"{entry.by} ({entry.operator})" if entry.operator else entry.by,
            ", ".join(str(each.get("run_id", "?"))[:12] for each in entry.evidence) or "-",
            entry.reason or "-",
        )
        for entry in entries
    ]
    print_table(columns, rows)


@app.command("verify")
@exit_on_error
def verify(
    log: LogFile,
    head: Annotated[
        str | None,
        typer.Option(metavar="SHA256", help="Digest that was noted elsewhere: it must be that of a line of the log."),
    ] = None,
) -> int:
    """Check that no line of an audit log was changed, removed or put in.

    A change of the last line, lines cut off at the end, and a file written
    anew are found by --head: the server logs the digest of each line.

    \b
    Example
      asr-serve policy verify audit.jsonl --head 3b1f...
    """
    from asr_serve.governance.audit_log import verify_log

    found = verify_log(log)
    digests = [*(entry.previous for entry in found.entries[1:]), found.head]
    print(f"{len(found.entries)} lines, digest of the last one: {found.head}")
    if found.torn_bytes:
        print_error(f"a last line of {found.torn_bytes} bytes without its end: a crash, or a server that writes it now")
    if head is not None and head not in digests:
        print_error(f"no line has the digest {head}: lines were cut off or changed, or it is that of another log")
        return FAILED
    return FAILED if found.torn_bytes else 0


def _ask(server: str, api_key: str | None, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Answer of a server. Raises Refused, Unreachable."""
    from asr_serve.api.cli.backends import server_answer

    content = None if body is None else json.dumps(body).encode()
    with server_answer(server, api_key or client_key(), method, path, content) as answer:
        return json.loads(answer.read())


def _operator() -> str:
    """Name of the user who runs this command."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
