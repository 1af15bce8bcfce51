"""Files of a tokenizer, from one machine to another."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own, when it is imported
    from asr_serve.cluster.engine_replica import read_small_files, write_small_files
from asr_serve.errors import PeerRefused


def test_all_but_the_weights_arrives(tmp_path: Path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    (source / "below").mkdir(parents=True)
    copy.mkdir()
    (source / "tokenizer.json").write_bytes(b"{}")
    (source / "below" / "vocab..txt").write_bytes(b"a")
    (source / "tokenizer.bin").write_bytes(b"pieces")
    (source / "model.safetensors").write_bytes(b"weights")
    (source / "model.bin").write_bytes(b"weights")
    write_small_files(copy, read_small_files(str(source)))
    found = {str(path.relative_to(copy)): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert found == {"tokenizer.json": b"{}", "tokenizer.bin": b"pieces", "below/vocab..txt": b"a"}


@pytest.mark.parametrize("name", ["../it", "/tmp/it", "below/../../it", "..", "", ".", "a\0b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(PeerRefused, match="below its folder"):
        write_small_files(folder, {"tokenizer.json": b"{}", name: b"evil"})
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]
