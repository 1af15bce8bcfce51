"""Where weights come from: every source, and every way it can fail."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import msgspec
import numpy as np
import pytest
from fun_asr_folders import write_ctc_folder
from hub_speech_llm_folders import write_shards

from asr_serve.errors import CacheNotWritable, WeightsCorrupt, WeightsMissing
from asr_serve.models.asr.moonshine import moonshine
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import AsrCard, PackagedWeights, asr_card, tts_card, vocoder_card

FILES = {"encoder_model.ort": b"encoder", "decoder_model_merged.ort": b"decoder"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing here touches the user's own."""
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[AsrCard, Path]:
    """A card with an installed package of its own, and the folder in it."""
    folder = tmp_path / "site" / "made_up_weights" / "assets"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    sums = {name: store.sha256_of(folder / name) for name in FILES}
    pack = PackagedWeights(requirement="made-up==1.0", module="made_up_weights", folder="assets", sha256=sums)
    return msgspec.structs.replace(asr_card("moonshine-tiny-en"), name="made-up", packaged=pack), folder


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Conversions that were run, with a converter that takes a moment."""
    ran: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        ran.append(source)
        (target / "config.json").write_text("{}")
        time.sleep(0.05)
        (target / "model.safetensors").write_bytes(b"tensors")

    monkeypatch.setattr(moonshine, "CONVERTER", moonshine.CONVERTER._replace(convert=convert))
    return ran


def checkpoint(folder: Path, data: bytes = b"tensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(data)
    return folder


# --- a cache that cannot be written -----------------------------------------------------------------------


def test_a_cache_that_cannot_be_written_is_named(
    packaged: tuple[AsrCard, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path / "file" / "cache"))
    for write in (store.resolve, store.fetch):
        with pytest.raises(CacheNotWritable) as refused:
            write(packaged[0])
        assert str(refused.value).startswith(f"weights cannot be written to {tmp_path / 'file' / 'cache'}: Not a direc")
        assert "set ASR_SERVE_CACHE" in refused.value.todo


def test_a_disk_that_fills_up_during_a_conversion(
    packaged: tuple[AsrCard, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(moonshine, "CONVERTER", moonshine.CONVERTER._replace(convert=convert))
    with pytest.raises(CacheNotWritable, match=f"{cache}: No space left on device"):
        store.resolve(packaged[0])
    assert not list(cache.glob("*/.building-*"))


# --- a package --------------------------------------------------------------------------------------------


def test_a_package_is_converted_once(packaged: tuple[AsrCard, Path], conversions: list[Path]) -> None:
    chosen, folder = packaged
    assert store.locate(chosen) == folder
    said: list[str] = []
    first = store.resolve(chosen, progress=said.append)
    assert store.is_checkpoint(first)
    assert store.locate(chosen) == first == store.resolve(chosen, progress=said.append)
    assert conversions == [folder]
    assert len(said) == 1


def test_converting_twice_at_once_gives_one_whole_checkpoint(
    packaged: tuple[AsrCard, Path], conversions: list[Path], cache: Path
) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(store.resolve(packaged[0]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert set(found) == {store.cached_folder(packaged[0])}
    assert sorted((cache / "made-up").iterdir()) == [found[0]], "no half-built folder stays"


def test_a_conversion_that_fails_leaves_nothing(
    packaged: tuple[AsrCard, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(moonshine, "CONVERTER", moonshine.CONVERTER._replace(convert=broken))
    with pytest.raises(OSError, match="disk full"):
        store.resolve(packaged[0])
    assert list((cache / "made-up").iterdir()) == []


@pytest.mark.parametrize("harm", [lambda p: p.write_bytes(b"other"), Path.unlink], ids=["changed", "gone"])
def test_a_corrupt_package(
    packaged: tuple[AsrCard, Path], conversions: list[Path], harm: Callable[[Path], Any]
) -> None:
    harm(packaged[1] / "encoder_model.ort")
    with pytest.raises(WeightsCorrupt, match=r"encoder_model\.ort.*install the package again"):
        store.resolve(packaged[0])
    assert conversions == []


def test_another_package_version_is_another_checkpoint(packaged: tuple[AsrCard, Path]) -> None:
    chosen, _ = packaged
    assert chosen.packaged is not None
    newer = msgspec.structs.replace(chosen.packaged, sha256={"encoder_model.ort": "0" * 64})
    assert store.cached_folder(msgspec.structs.replace(chosen, packaged=newer)) != store.cached_folder(chosen)


# --- nothing there ----------------------------------------------------------------------------------------


def test_missing_names_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "package_folder", lambda card: None)
    assert store.locate(asr_card("moonshine-tiny-en")) is None
    with pytest.raises(WeightsMissing) as tiny:
        store.resolve(asr_card("moonshine-tiny-en"))
    assert "pip install moonshine-voice==0.1.0" in str(tiny.value)
    assert "asr-serve models fetch moonshine-tiny-en" in str(tiny.value)
    with pytest.raises(WeightsMissing) as base:
        store.resolve(asr_card("moonshine-base-en"))
    assert "pip install" not in str(base.value)


# --- a folder of the user's -------------------------------------------------------------------------------


def test_a_checkpoint_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "mine")
    assert store.resolve(asr_card("moonshine-base-en"), folder) == folder


def test_a_folder_of_graphs_is_converted_again_when_it_changes(tmp_path: Path, conversions: list[Path]) -> None:
    chosen = asr_card("moonshine-base-en")
    folder = tmp_path / "graphs"
    folder.mkdir()
    for name in ("encoder_model.onnx", "decoder_model_merged.onnx"):
        (folder / name).write_bytes(b"graph")
    first = store.resolve(chosen, folder)
    assert store.resolve(chosen, str(folder)) == first
    (folder / "encoder_model.onnx").write_bytes(b"a longer graph")
    assert store.resolve(chosen, folder) != first
    assert len(conversions) == 2


@pytest.mark.parametrize("suffix", ["onnx", "ort"])
def test_graphs_that_are_none(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    for name in ("encoder_model", "decoder_model_merged"):
        (tmp_path / f"{name}.{suffix}").write_bytes(b"\x0fnot a graph" * 9)
    with pytest.raises(WeightsCorrupt, match="encoder_model"):
        store.resolve(asr_card("moonshine-base-en"), tmp_path)


@pytest.mark.parametrize("there", [(), ("config.json",), ("encoder_model.onnx",)])
def test_a_folder_with_neither(tmp_path: Path, there: tuple[str, ...]) -> None:
    folder = tmp_path / "mine"
    with pytest.raises(WeightsMissing, match="there is nothing at"):
        store.resolve(asr_card("moonshine-base-en"), folder)
    folder.mkdir()
    for name in there:
        (folder / name).write_text("{}")
    with pytest.raises(WeightsMissing, match=r"config\.json and model\.safetensors"):
        store.resolve(asr_card("moonshine-base-en"), folder)


# --- graphs -----------------------------------------------------------------------------------------------


def test_eight_bit_weights() -> None:
    from asr_serve.models.checkpoints.onnx_graph import _dequantised

    value = np.array([[0, 100, 255]], np.uint8)
    matrix = {
        "m_quantized": value,
        "m_scale": np.float32(0.5),
        "m_zero_point": np.uint8(100),
        "conv_quantized": value.astype(np.int8),
        "conv_scale": np.array([0.5], np.float32),
        "conv_zero_point": np.array([3.0], np.float32),
    }
    np.testing.assert_array_equal(_dequantised("m_quantized", matrix), [[-50, 0, 77.5]])
    # a convolution's zero point is a float and is added last
    np.testing.assert_array_equal(_dequantised("conv_quantized", matrix), [[3, 53, 2.5]])


def test_the_older_export_of_base(packaged_speech: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`npm pack @usefulsensors/moonshine-js@0.1.17`, package/dist/model/base/quantized."""
    folder = os.environ.get("ASR_SERVE_MOONSHINE_BASE")
    if not folder:
        pytest.skip("ASR_SERVE_MOONSHINE_BASE names no folder with the older export of base")
    import asr_serve

    with asr_serve.load("moonshine-base-en", weights=folder) as model:
        [heard] = model.transcribe(packaged_speech / "beckett.wav")
    assert heard.text.lower().replace(",", "").startswith("ever tried ever failed no matter try again")


# --- the hub ----------------------------------------------------------------------------------------------


class Hub:
    """What the hub has; counts downloads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files = {"config.json": b"{}", "model.safetensors": b"tensors", "tokenizer.json": b"{}"}
        self.failure: Exception | None = None
        self.downloads = 0
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)

    def download(self, repo: str, *, revision: str, local_dir: Path, allow_patterns: Any) -> None:
        self.downloads += 1
        Path(local_dir).mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            assert any(fnmatch(name, pattern) for pattern in allow_patterns)
            (Path(local_dir) / name).write_bytes(data)
            if self.failure:
                raise self.failure


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(monkeypatch)


BASE = asr_card("moonshine-base-en")


def test_fetch_locks_what_it_got(hub: Hub) -> None:
    folder = store.fetch(BASE)
    assert folder == store.locate(BASE) == store.resolve(BASE)
    lock = json.loads((folder / "sha256.json").read_text())
    assert lock == {name: store.sha256_of(folder / name) for name in hub.files}
    assert store.fetch(BASE) == folder
    assert hub.downloads == 2


def test_changed_files_are_refused_and_the_old_ones_stay(hub: Hub) -> None:
    folder = store.fetch(BASE)
    hub.files["model.safetensors"] = b"other tensors"
    with pytest.raises(WeightsCorrupt, match="changed since they were first fetched"):
        store.fetch(BASE)
    assert (folder / "model.safetensors").read_bytes() == b"tensors"


@pytest.mark.parametrize(
    ("write", "missing"),
    [
        (partial(write_shards, "qwen3"), "model-00002-of-00002.safetensors"),
        (write_ctc_folder, "multilingual.tiktoken"),
        (write_ctc_folder, "model.pt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_snapshot_without_all_of_its_files_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path], missing: str
) -> None:
    """What a broken download left in the cache of the hub's client is no model yet."""
    folder = write(tmp_path / "snapshot")
    kept = (folder / missing).rename(tmp_path / "kept")
    downloads = []

    def download(name: str, *, local_files_only: bool = False, **_: Any) -> str:
        if not local_files_only:
            downloads.append(name)
            shutil.copy(kept, folder / missing)
        return str(folder)

    def away(*_: Any, **__: Any) -> None:
        raise OSError("no route to the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", away)
    with pytest.raises(WeightsMissing, match=r"not whole, and .*no route"):
        store.repository_folder("somebody/model")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    assert [store.repository_folder("somebody/model") for _ in range(2)] == [folder] * 2
    assert downloads == ["somebody/model"], "a whole one is not fetched again"


def test_a_download_that_breaks_off_is_no_checkpoint(hub: Hub) -> None:
    hub.failure = OSError("connection lost\nand a long story")
    with pytest.raises(WeightsMissing, match="connection lost") as broken:
        store.fetch(BASE)
    assert "long story" not in str(broken.value)
    assert store.locate(BASE) is None
    hub.failure = None
    assert store.is_checkpoint(store.fetch(BASE))


def test_a_repository_without_weights(hub: Hub) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(WeightsMissing, match=r"what it has of config\.json, .* is no checkpoint"):
        store.fetch(BASE)


NEMO = Path(__file__).parent / "fixtures" / "fastconformer_hybrid.nemo"
STREAMING = asr_card("fastconformer-streaming-medium-en")


def test_what_its_authors_publish_is_fetched_and_converted_once(hub: Hub) -> None:
    hub.files = {"model.nemo": NEMO.read_bytes()}
    assert store.locate(STREAMING) is None
    folder = store.fetch(STREAMING)
    assert store.is_checkpoint(folder)
    assert folder == store.locate(STREAMING) == store.resolve(STREAMING)
    shutil.rmtree(folder)
    assert store.resolve(STREAMING) == folder, "converted again of what was fetched"
    assert store.fetch(STREAMING) == folder
    hub.files["model.nemo"] += b"x"
    with pytest.raises(WeightsCorrupt, match="changed since"):
        store.fetch(STREAMING)
    hub.files = {}
    with pytest.raises(WeightsMissing, match=r"what it has of \*\.nemo is no checkpoint"):
        store.fetch(msgspec.structs.replace(STREAMING, revision="other"))


def test_other_files_under_the_same_name_are_converted_again(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"model.nemo": NEMO.read_bytes()}
    folder = store.fetch(STREAMING)
    before = json.loads((folder / "source-sha256.json").read_text())
    shutil.rmtree(store.hub_cache_folder(STREAMING))  # as the refusal says, for who trusts the new ones
    hub.files["model.nemo"] += bytes(512)  # past an archive's end
    assert store.fetch(STREAMING) == folder
    assert json.loads((folder / "source-sha256.json").read_text())["model.nemo"] != before["model.nemo"]


def test_a_file_or_its_folder_may_be_given(tmp_path: Path) -> None:
    (tmp_path / "mine.nemo").write_bytes(NEMO.read_bytes())
    one, folder = store.resolve(STREAMING, tmp_path / "mine.nemo"), store.resolve(STREAMING, tmp_path)
    assert store.is_checkpoint(one)
    assert (one / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    (tmp_path / "other").mkdir()
    with pytest.raises(WeightsMissing, match=r"\*\.nemo"):
        store.resolve(STREAMING, tmp_path / "other")


@pytest.mark.parametrize("share", [0.02, 0.3, 0.75, 0.9])
def test_a_file_that_breaks_off(tmp_path: Path, share: float) -> None:
    whole = NEMO.read_bytes()
    (tmp_path / "mine.nemo").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(WeightsCorrupt, match=r"mine\.nemo"):
        store.resolve(STREAMING, tmp_path / "mine.nemo")


@pytest.mark.slow
@pytest.mark.parametrize("answers", [False, True], ids=["refuses", "says nothing"])
def test_a_hub_that_cannot_be_reached_is_told_soon(cache: Path, answers: bool) -> None:
    left = store.hub_cache_folder(BASE)
    left.mkdir(parents=True)
    (left / "config.json").write_text("{}")  # an earlier, broken download must not pass for the whole
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        if answers:
            hole.listen(8)
        code = (
            "from asr_serve.models import registry; from asr_serve.models.checkpoints import store; "
            f"store.fetch(registry.asr_card({BASE.name!r}))"
        )
        environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hole.getsockname()[1]}"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "WeightsMissing" in done.stderr
    assert "could not fetch UsefulSensors/moonshine-base" in done.stderr
    assert time.monotonic() - started < 120


# --- shipped with this package ----------------------------------------------------------------------------


def test_what_ships_with_us_is_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PACKAGE", tmp_path)
    voice = msgspec.structs.replace(
        tts_card("hibari"), packaged=None, shipped="models/tts/weights/own", files=("config.json", "voice.bin")
    )
    assert store.locate(voice) is None
    with pytest.raises(WeightsMissing, match="install asr-serve again"):
        store.verified_published_folder(voice)
    folder = tmp_path / "models" / "tts" / "weights" / "own"
    checkpoint(folder)
    assert store.locate(voice) is None, "not all of its files are there"
    (folder / "voice.bin").write_bytes(b"voice")
    assert (
        store.locate(voice)
        == store.verified_published_folder(voice)
        == store.published_or_given_folder(voice, None)
        == folder
    )
    with pytest.raises(WeightsMissing, match="on no hub"):
        store.fetch(voice)


def test_a_voice_may_lie_where_somebody_says(tmp_path: Path) -> None:
    assert store.published_or_given_folder(tts_card("hibari"), tmp_path) == tmp_path
    with pytest.raises(WeightsMissing, match="there is nothing at"):
        store.published_or_given_folder(tts_card("hibari"), tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("broken", "content"),
    [
        ("fastpitch-en/config.json", b"{"),
        ("fastpitch-en/model.safetensors", b"version https://git-lfs.github.com/spec/v1"),
        ("source_filter/model.safetensors", None),
    ],
)
def test_a_voice_that_nobody_named_gives_way_to_another_where_its_weights_are_broken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
    content: bytes | None,
) -> None:
    ours = tts_card("fastpitch-en")
    for folder in (ours.shipped, vocoder_card(ours.vocoder).shipped):
        shutil.copytree(store.PACKAGE / folder, tmp_path / folder)
    monkeypatch.setattr(store, "PACKAGE", tmp_path)
    assert store.auto_voice() == ours
    (path,) = tmp_path.glob(f"models/**/weights/{broken}")
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    assert store.auto_voice().name == "hibari"
    assert "the voice fastpitch-en is not used" in caplog.text
    assert str(path) in caplog.text
    caplog.clear()
    path.unlink()
    assert store.auto_voice().name == "hibari"
    assert not caplog.text


@pytest.mark.parametrize("sums", [None, b"{", b"[]"])
def test_gathered_files_without_their_sums_are_corrupt(cache: Path, sums: bytes | None, monkeypatch) -> None:
    card = tts_card("kokoro")
    folder = cache / card.name
    folder.mkdir(parents=True)
    monkeypatch.setattr(store.gathered_model_file(card), "complete", lambda folder: True)
    if sums is not None:
        (folder / store.SUMS).write_bytes(sums)
    with pytest.raises(WeightsCorrupt, match="asr-serve models fetch kokoro"):
        store.verified_published_folder(card)


def test_a_change_in_a_folder_below_is_another_source(tmp_path: Path):
    (tmp_path / "am").mkdir()
    (tmp_path / "am" / "final.mdl").write_bytes(b"one")
    before = store.folder_fingerprint(tmp_path)
    assert store.folder_fingerprint(tmp_path) == before
    (tmp_path / "am" / "final.mdl").write_bytes(b"three")
    assert store.folder_fingerprint(tmp_path) != before
