"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Option("--model", "-m", help="Which model; see: asr-serve models list")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, fp32 or bf16.")]
Weights = Annotated[
    str | None, typer.Option(metavar="DIR", help="A checkpoint folder instead of the model's own.")
]
Language = Annotated[str | None, typer.Option("--language", "-l", help="Language code, like en.")]
