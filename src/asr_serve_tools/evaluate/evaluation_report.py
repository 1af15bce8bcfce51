"""Report of an evaluation: one HTML page that holds its style, its program, its data and, up to a bound, the audio.

Tables, plot and clips are drawn by evaluation_view.js, which the console's page /models uses too. The page asks for
nothing over a network. Its content security policy allows the one program and the one style sheet in it, by digest, so
that nothing in a transcript can run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import mimetypes
import os
from pathlib import Path
from urllib.parse import quote

import msgspec

from asr_serve.evaluation.store import EvaluationStore
from asr_serve.output_file import replaced_file

MIB = 1 << 20
MOST_ROWS = 500
"""Clips of a run in the page, those with most errors."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>Evaluation of recognizers</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>Evaluation of recognizers</h1>
<p class="soft">Made by asr-serve eval from {store}. Intervals hold 95 % of 1,000 resamples of the clips.</p>
</header>
<main id="evaluations"></main>
<script type="application/json" id="data">{data}</script>
<script type="module">{program}</script>
</body>
</html>
"""


def write_report(store: EvaluationStore, path: Path, most_audio_bytes: int) -> str:
    """Writes the page, whole or not at all, and returns a sentence about it. `most_audio_bytes`: bound on the audio
    that is embedded, of the clips with most errors first; others are played from their files, by relative path."""
    runs, wanted = [], dict[Path, int]()
    for summary in store.summaries():
        folder = store.run(summary.run_id).dataset.folder
        rows = []
        for result in store.results(summary.run_id, "errors", MOST_ROWS):
            place = wanted.setdefault(Path(folder, result.path), len(wanted))
            rows.append({**msgspec.structs.asdict(result), "audio": place})
        runs.append({**msgspec.structs.asdict(summary), "rows": rows})
    audio, left_out = _audio(list(wanted), path.absolute().parent, most_audio_bytes)
    encoded = msgspec.json.encode({"runs": runs, "audio": audio, "left_out": left_out}).decode()
    for letter in "<>&\u2028\u2029":  # no text ends the element that holds it
        encoded = encoded.replace(letter, f"\\u{ord(letter):04x}")
    style, program = (
        "\n".join(Path(__file__).with_name(f"{name}.{kind}").read_text("utf-8") for name in names)
        for kind, names in (("css", ("report_page", "evaluation_view")), ("js", ("evaluation_view", "report_page")))
    )
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(program)}'; media-src data: file: 'self'; "
        "base-uri 'none'; form-action 'none'"
    )
    page = _PAGE.format(
        policy=policy, style=style, store=html.escape(store.path.name), data=encoded, program=program
    ).encode()
    with replaced_file(path) as part:
        part.write_bytes(page)
    return f"{path}: {len(runs)} runs, {len(page) / MIB:.1f} MiB. {left_out}".strip()


def _audio(files: list[Path], folder: Path, most_bytes: int) -> tuple[list[str | None], str]:
    """Address of each file for the page, and a sentence about those that are not in it."""
    found: list[str | None] = []
    left_bytes, outside, missing = most_bytes, 0, 0
    for file in files:
        try:
            size = file.stat().st_size
            if size <= left_bytes:
                kind = (mimetypes.guess_type(file.name)[0] or "audio/wav").replace("/x-", "/")
                found.append(f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}")
                left_bytes -= size
                continue
        except OSError:
            missing += 1
            found.append(None)
            continue
        outside += 1
        found.append(quote(Path(os.path.relpath(file, folder)).as_posix()))
    said = []
    if outside:
        said.append(
            f"{outside} of {len(files)} clips are played from their files, because they exceed the bound on audio"
        )
    if missing:
        said.append(f"{missing} clips have no audio, because their files are gone")
    return found, "; ".join(said).capitalize() + ("." if said else "")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
