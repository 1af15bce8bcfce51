"""Model folders of FunASR with random weights that are sure of what they write.

The fixture's answers are all but equally likely, and a pipeline drops such answers as no speech. Greater logits have
the same order: greedy answers stay the fixture's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fun_asr_folders import write_ctc_folder, write_folder

from asr_serve.api.library import Model
from asr_serve.errors import WeightsMissing
from asr_serve.pipelines.segments import check_diarization

FACTOR = 40.0


def write_sharp(name: str, folder: Path) -> Path:
    """Writes a folder as FunASR has it, whose logits are FACTOR times those of the fixture. `name`: one of MODELS, or
    ctc, which is nano with a CTC head."""
    if name == "ctc":
        write_ctc_folder(folder)
    else:
        write_folder(name, folder)
    state = torch.load(folder / "model.pt", weights_only=True)
    state["state_dict"]["llm.model.norm.weight"] *= FACTOR
    torch.save(state, folder / "model.pt")
    return folder


def require_speakers(model: Model) -> None:
    """For tests that want to be told who speaks."""
    try:
        check_diarization(model.client)
    except WeightsMissing as missing:
        pytest.skip(str(missing))
