"""Report of an evaluation: one HTML page that holds its style, its program, its data and, up to a bound, the audio.

The page asks for nothing over a network. Its content security policy allows the one program and the one style sheet in
it, by digest, so that nothing in a transcript can run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import mimetypes
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from asr_serve.evaluation.store import EvaluationResult, EvaluationRun, EvaluationStore
from asr_serve.output_file import replaced_file
from asr_serve_tools.evaluate.clip_scores import text_differences

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
<main>
<div class="controls">
<label>Dataset <select id="dataset"><option value="">all</option></select></label>
<label>System <select id="system"><option value="">all</option></select></label>
</div>
<h2 id="runs-title">Runs</h2>
<div class="scroll" id="runs" role="region" aria-labelledby="runs-title" tabindex="0"></div>
<h2>Speed and accuracy</h2>
<div class="plot" id="plot"></div>
<p class="soft" id="tip" aria-live="polite"></p>
<p class="soft" id="plot-note"></p>
<h2>Errors</h2>
<p class="soft">Normalized words: <del>missing</del>, <ins>added</ins>; both in a box where one replaces the other.</p>
<div class="controls">
<label>Run <select id="run"></select></label>
<label>Order <select id="order"></select></label>
</div>
<div id="clips"></div>
<p class="soft" id="clips-note"></p>
<p class="soft" id="left-out"></p>
</main>
<script type="application/json" id="data">{data}</script>
<script>{program}</script>
</body>
</html>
"""


def write_report(store: EvaluationStore, path: Path, most_audio_bytes: int) -> str:
    """Writes the page, whole or not at all, and returns a sentence about it. `most_audio_bytes`: bound on the audio
    that is embedded, of the clips with most errors first; others are played from their files, by relative path."""
    summaries = {each.run_id: each for each in store.summaries()}
    runs, wanted = [], dict[Path, int]()
    for run in store.runs():
        if run.run_id not in summaries:
            continue
        rows = []
        for result in sorted(store.results(run.run_id), key=_weight, reverse=True)[:MOST_ROWS]:
            file = Path(run.dataset.folder, result.path)
            wanted.setdefault(file, len(wanted))
            rows.append(_row(run, result, wanted[file]))
        runs.append({**msgspec.structs.asdict(summaries[run.run_id]), "rows": rows})
    audio, left_out = _audio(list(wanted), path.absolute().parent, most_audio_bytes)
    encoded = msgspec.json.encode({"runs": runs, "audio": audio, "left_out": left_out}).decode()
    for letter in "<>&\u2028\u2029":  # no text ends the element that holds it
        encoded = encoded.replace(letter, f"\\u{ord(letter):04x}")
    style, program = (Path(__file__).with_name(f"report_page.{kind}").read_text("utf-8") for kind in ("css", "js"))
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


def _weight(result: EvaluationResult) -> tuple[bool, int, str]:
    return result.error is not None, _errors(result)[0] or 0, result.path


def _errors(result: EvaluationResult) -> tuple[int | None, int | None]:
    """Errors and length of the reference in words, or in characters where words are not counted."""
    if result.words is not None:
        return result.word_errors, result.words
    return result.character_errors, result.characters


def _row(run: EvaluationRun, result: EvaluationResult, audio: int) -> dict[str, Any]:
    errors, length = _errors(result)
    difference = None
    if result.reference is not None and result.hypothesis is not None:
        space = " " if result.words is not None else ""
        difference = [
            (part.kind, space.join(part.reference), space.join(part.hypothesis))
            for part in text_differences(result.reference, result.hypothesis, run.dataset.language)
        ]
    return {
        "path": result.path,
        "audio_s": result.audio_s,
        "hypothesis": result.hypothesis,
        "difference": difference,
        "errors": errors,
        "length": length,
        "seconds": result.seconds,
        "first_word_ms": result.first_word_ms,
        "final_ms": result.final_ms,
        "error": result.error,
        "audio": audio,
    }


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
