"""A hub repository stands for a model: by `hf:ORG/NAME`, or `ORG/NAME` where there is no such folder. The repositories
lie in a cache of the hub's client, as it lays them out, and no hub is reached."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fun_asr_folders import clips, write_ctc_folder
from hub_speech_llm_folders import write_folder
from huggingface_hub import constants
from typer.testing import CliRunner

import asr_serve
from asr_serve.api.cli import app
from asr_serve.api.cli.exit_codes import FAILED, USAGE
from asr_serve.config import EngineConfig, ServeConfig
from asr_serve.engine.builder import AsrCheckpoint, find_checkpoint
from asr_serve.engine.process.startup_checks import StartupNames, check_names
from asr_serve.errors import NoCheckpoint, OptionError, UnknownModel, WeightsMissing
from asr_serve.funasr import loading
from asr_serve.models.checkpoints import store

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Publish = Callable[[str, Path], Path]


@pytest.fixture(autouse=True)
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of its own, a folder without any other to stand in, and a hub that refuses connections."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def publish(tmp_path: Path) -> Publish:
    """Puts a folder into the hub's cache under a repository's name; returns its snapshot."""

    def put(repository: str, folder: Path) -> Path:
        root = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
        snapshot = root / "snapshots" / COMMIT
        for path in (path for path in sorted(folder.rglob("*")) if path.is_file()):
            blob, link = root / "blobs" / store.sha256_of(path), snapshot / path.relative_to(folder)
            for parent in (blob.parent, link.parent):
                parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, blob)
            link.symlink_to(blob)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(COMMIT)
        return snapshot

    return put


def find(model: str) -> AsrCheckpoint:
    found = find_checkpoint(model, None, EngineConfig())
    assert isinstance(found, AsrCheckpoint)
    return found


@pytest.mark.parametrize("prefix", ["", "hf:"])
@pytest.mark.parametrize(
    ("repository", "card"),
    [
        ("Qwen/Qwen3-ASR-0.6B-hf", "qwen3-asr-0.6b"),
        ("Qwen/Qwen3-ASR-1.7B-hf", "qwen3-asr-1.7b"),
        ("someone/their-own.asr_1", "qwen3-asr-0.6b"),
    ],
)
def test_a_repository_is_read_where_the_hubs_client_put_it(
    publish: Publish, tmp_path: Path, prefix: str, repository: str, card: str
) -> None:
    snapshot = publish(repository, write_folder("qwen3", tmp_path / "source"))
    found = find(f"{prefix}{repository}")
    assert (found.card.name, found.folder) == (card, snapshot)


def test_a_repository_of_funasr_is_converted_once_and_loads(publish: Publish, tmp_path: Path) -> None:
    repository = "FunAudioLLM/Fun-ASR-MLT-Nano-2512"
    snapshot = publish(repository, write_ctc_folder(tmp_path / "source"))
    first, second = find(repository), find(f"hf:{repository}")
    assert first.folder == second.folder != snapshot
    with asr_serve.load(repository, device="cpu", dtype="fp32", turn_model="none") as model:
        assert (model.card.name, model.card.word_times) == ("fun-asr-mlt-nano", True)
        model.transcribe([clips()[2]], vad=False)


def test_a_folder_comes_before_a_repository_of_its_name(publish: Publish, tmp_path: Path) -> None:
    publish("org/qwen", write_folder("qwen3", tmp_path / "source"))
    here = write_folder("glm", tmp_path / "here" / "org" / "qwen")
    assert find("org/qwen").card.name == "glm-asr-nano"
    assert find("hf:org/qwen").card.name == "qwen3-asr-0.6b"
    shutil.rmtree(here)
    assert find("org/qwen").card.name == "qwen3-asr-0.6b"


def test_a_folder_named_after_a_card_is_of_that_card(tmp_path: Path) -> None:
    for name, card in (
        ("Qwen3-ASR-1.7B-hf", "qwen3-asr-1.7b"),
        ("qwen3-asr-1.7b", "qwen3-asr-1.7b"),
        ("other", "qwen3-asr-0.6b"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        assert find(str(write_folder("qwen3", folder))).card.name == card


def test_a_repository_that_is_not_here_is_missing_by_name(publish: Publish, tmp_path: Path) -> None:
    source = write_folder("qwen3", tmp_path / "source")
    (source / "model.safetensors").unlink()
    publish("org/part", source)
    for model, repository in (("hf:org/gone", "org/gone"), ("org/gone", "org/gone"), ("org/part", "org/part")):
        with pytest.raises(WeightsMissing, match=repository) as missing:
            find(model)
        assert "fetched" in str(missing.value)
        assert "folder" in missing.value.todo


def test_an_offline_client_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsMissing, match="offline"):
        find("org/gone")


@pytest.mark.parametrize("model", ["hf:", "hf:name", "hf:a/b/c", "hf:../x", "hf:a/b@main"])
def test_what_is_no_repository_is_refused(model: str) -> None:
    with pytest.raises(OptionError, match="ORG/NAME"):
        find(model)


def test_a_repository_with_a_mistake_in_its_name_is_suggested() -> None:
    for model, meant in (
        ("FunAudioLLM/Fun-ASR-Nano-2521", "FunAudioLLM/Fun-ASR-Nano-2512"),
        ("funasr/fun-asr-nano-2512", "FunAudioLLM/Fun-ASR-Nano-2512"),
        ("hf:qwen/qwen3-asr-1.7b", "Qwen/Qwen3-ASR-1.7B-hf"),
    ):
        with pytest.raises(WeightsMissing) as missing:
            find(model)
        assert missing.value.todo == f"did you mean {meant!r}?"
    for model in ("org/gone", "FunAudioLLM/SenseVoiceSmall", "openai/whisper-large-v3"):
        with pytest.raises(WeightsMissing) as missing:
            find(model)
        assert "did you mean" not in str(missing.value)


def test_fetch_takes_a_repository_as_models_are_named(publish: Publish, tmp_path: Path) -> None:
    """It is converted too, so that loading it only reads it."""
    repository = "FunAudioLLM/Fun-ASR-MLT-Nano-2512"
    publish(repository, write_ctc_folder(tmp_path / "source"))
    fetched = CliRunner().invoke(app, ["models", "fetch", repository])
    assert fetched.exit_code == 0
    assert Path(fetched.stdout.strip()) == find(repository).folder
    missing = CliRunner().invoke(app, ["models", "fetch", "FunAudioLLM/Fun-ASR-MLT-Nano"])
    assert missing.exit_code == 1
    assert f"did you mean {repository!r}?" in missing.stderr


@pytest.mark.parametrize(
    ("name", "files", "came"),
    [
        ("gone", None, "there is nothing at {}"),
        ("empty", {}, "{} is an empty folder"),
        ("notes", {f"{n}.txt": "" for n in range(8)}, "it has 0.txt, 1.txt, 2.txt, 3.txt, 4.txt, 5.txt and 2 more"),
        ("llama", {"config.json": '{"model_type": "llama"}', "model.safetensors": ""}, "model_type='llama'"),
        ("part", {"config.json": '{"model_type": "qwen3_asr"}'}, "the config.json of a qwen3_asr, and not all"),
    ],
)
def test_a_folder_without_a_model_says_what_is_in_it(
    name: str, files: dict[str, str] | None, came: str, tmp_path: Path
) -> None:
    """`models convert` and every -m say the same; a folder of the working folder needs no ./ before it."""
    if files is not None:
        Path(name).mkdir()
        for file, text in files.items():
            (Path(name) / file).write_text(text)
    for model in (f"./{name}", str(Path(name).absolute()), *([] if files is None else [name])):
        with pytest.raises(WeightsMissing) as found:
            find(model)
        assert came.format(Path(model)) in found.value.came
        assert "model_type is one of: deepspeech, " in found.value.allowed
        assert "check the path" in found.value.todo or "download" in found.value.todo
        with pytest.raises(WeightsMissing) as converted:
            store.convert_to(Path(model), tmp_path / "out")
        assert str(converted.value) == str(found.value)
        with pytest.raises(WeightsMissing) as funasr:
            loading.find_model(model, "ms")
        assert str(funasr.value) == str(found.value)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    Path("notes.txt").write_text("no model")
    with pytest.raises(WeightsMissing, match="is a file, and holds no model"):
        find("./notes.txt")


def test_a_name_is_that_of_a_card_before_a_folder() -> None:
    Path("qwen3-asr-0.6b").mkdir()
    with pytest.raises(WeightsMissing, match=r"weights of qwen3-asr-0\.6b are not"):
        find("qwen3-asr-0.6b")
    with pytest.raises(UnknownModel, match="or a folder, or ORG/NAME"):
        find("nomodel")


def test_a_server_takes_repositories_and_folders_among_its_models() -> None:
    Path("folder").mkdir()
    write_folder("qwen3", Path("folder"))
    Path("empty").mkdir()

    def check(*names: str, aliases: dict[str, str] | None = None, weights: str | None = None) -> None:
        config = ServeConfig(voice="none", more_models=names, max_models=9, aliases=aliases or {}, weights=weights)
        check_names(StartupNames.of(config, None, ()))

    check("org/name", "hf:org/name", "./folder", "folder", aliases={"whisper-1": "org/name"})
    with pytest.raises(OptionError, match=r"no model 'foldr'") as refused:
        check("folder", "foldr")
    assert refused.value.param == "more_models"
    with pytest.raises(OptionError, match="alias 'whisper-1'"):
        check("folder", aliases={"whisper-1": "org/name"})
    for gone, said in (("./gone", "nothing at gone"), ("empty", "empty is an empty folder")):
        with pytest.raises(NoCheckpoint, match=said):
            check(gone)
    with pytest.raises(NoCheckpoint, match="no checkpoint of moonshine-tiny-en at empty"):
        check(weights="empty")


def test_show_says_what_a_server_would_do(publish: Publish, tmp_path: Path) -> None:
    def show(model: str) -> list[object]:
        done = CliRunner().invoke(app, ["models", "show", model, "--json"])
        assert done.exit_code == 0, done.stderr
        shown = json.loads(done.stdout)
        return [shown[field] for field in ("name", "folder", "server")]

    snapshot = str(publish("someone/asr", write_folder("qwen3", tmp_path / "source")))
    for model in ("someone/asr", "hf:someone/asr", snapshot):
        assert show(model) == ["qwen3-asr-0.6b", snapshot, "loads this folder"]
    published = str(write_ctc_folder(tmp_path / "published"))
    assert show(published) == ["fun-asr-nano", published, "converts this folder once, then loads it"]
    missing = "Qwen/Qwen3-ASR-1.7B-hf"
    assert show(missing) == ["qwen3-asr-1.7b", None, f"downloads {missing} from the hub, then loads it"]
    lines = CliRunner().invoke(app, ["models", "show", missing]).stdout
    assert f"asr-serve models fetch {missing}" in lines


@pytest.mark.parametrize(
    ("model", "said", "code"),
    [
        ("hf:org/gone", "org/gone is not on this machine, and no model here names it", FAILED),
        ("org/Qwen3-ASR-1.7B-hf", "did you mean 'Qwen/Qwen3-ASR-1.7B-hf'?", FAILED),
        ("hf:gone", "hf:ORG/NAME", USAGE),
        ("./gone", "there is nothing at gone", USAGE),
    ],
)
def test_show_says_why_it_shows_nothing(model: str, said: str, code: int) -> None:
    done = CliRunner().invoke(app, ["models", "show", model])
    assert said in done.stderr
    assert (done.stdout, done.exit_code) == ("", code)


@pytest.mark.parametrize(
    "command",
    [
        ["models", "convert", "{}", "./out"],
        ["models", "show", "{}"],
        ["models", "fetch", "nomodel"],
        ["transcribe", "talk.wav", "-m", "{}"],
        ["transcribe", "talk.wav", "--weights", "{}"],
        ["serve", "-m", "{}"],
        ["serve", "--weights", "{}"],
    ],
    ids=" ".join,
)
def test_a_path_without_a_model_is_wrong_usage(command: list[str]) -> None:
    """As an unknown name is, whatever the command."""
    done = CliRunner().invoke(app, [part.format("./nomodel") for part in command])
    assert done.stderr.startswith("error: there is no"), done.stderr
    assert "nomodel" in done.stderr.splitlines()[0]
    assert (done.stdout, done.exit_code) == ("", USAGE)


def test_weights_beside_a_repository_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="weights"):
        find_checkpoint("hf:org/name", tmp_path, EngineConfig())
