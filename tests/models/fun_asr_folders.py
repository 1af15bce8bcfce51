"""Model folders of FunASR with random weights, as the fixture fun_asr.safetensors has them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from fixture_files import facts_of, tensors_of
from torch import Tensor

from asr_serve.models.asr.speech_llm import funasr_folder

FIXTURE = Path(__file__).parent / "fixtures" / "fun_asr.safetensors"
MODELS = ("nano", "llmasr")


def facts() -> dict[str, Any]:
    """`spans`, `tokenizer`, and for each of `models` its settings, prompts and answers."""
    return facts_of(FIXTURE)


def tensors() -> dict[str, Tensor]:
    return tensors_of(FIXTURE)


@cache
def clips() -> list[np.ndarray]:
    """The three clips, float32 in -1..1."""
    audio = tensors()["audio"].numpy().astype(np.float32) / 32_768
    return [audio[start:end].copy() for start, end in facts()["spans"]]


def weights(name: str) -> dict[str, Tensor]:
    """Tensors of a model.pt by FunASR's names."""
    start = f"{name}.weights."
    return {key[len(start) :]: value.float() for key, value in tensors().items() if key.startswith(start)}


def write_folder(name: str, folder: Path) -> Path:
    """Writes a folder as FunASR has it."""
    known = facts()["models"][name]
    language = folder / known["settings"]["llm_conf"]["init_param_path"]
    language.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(known["settings"], allow_unicode=True), "utf-8")
    if known["cmvn"]:
        (folder / "am.mvn").write_text(known["cmvn"])
    torch.save({"state_dict": weights(name)}, folder / "model.pt")
    (language / "config.json").write_text(json.dumps(known["language_model"]))
    (language / "tokenizer.json").write_text(facts()["tokenizer"], "utf-8")
    return folder


def write_converted(name: str, folder: Path) -> Path:
    """Writes a converted folder, below `folder`."""
    converted = folder / "converted"
    converted.mkdir(parents=True)
    funasr_folder.convert(write_folder(name, folder / "source"), converted)
    return converted


# --- with a CTC head ------------------------------------------------------------------------------

CTC_FIXTURE = FIXTURE.with_name("fun_asr_ctc.safetensors")


def ctc_facts() -> dict[str, Any]:
    """`settings`, `vocabulary`, `blank`, `texts`, their `tokens`, and for each clip the `alignments` of each text."""
    return facts_of(CTC_FIXTURE)


def ctc_tensors() -> dict[str, Tensor]:
    return tensors_of(CTC_FIXTURE)


def ctc_weights() -> dict[str, Tensor]:
    """Tensors of nano's CTC decoder and head by FunASR's names."""
    return {name: value.float() for name, value in ctc_tensors().items() if name.startswith(("ctc_decoder.", "ctc."))}


def write_ctc_folder(folder: Path) -> Path:
    """Writes the folder of nano, with a CTC head."""
    write_folder("nano", folder)
    settings = yaml.safe_load((folder / "config.yaml").read_text("utf-8")) | ctc_facts()["settings"]
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, allow_unicode=True), "utf-8")
    (folder / "multilingual.tiktoken").write_text(ctc_facts()["vocabulary"])
    torch.save({"state_dict": weights("nano") | ctc_weights()}, folder / "model.pt")
    return folder


def write_ctc_converted(folder: Path) -> Path:
    """Writes the converted folder of nano with a CTC head, below `folder`."""
    converted = folder / "converted"
    converted.mkdir(parents=True)
    funasr_folder.convert(write_ctc_folder(folder / "source"), converted)
    return converted
