"""Language models over the protocols, to a real recogniser behind the real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import MODEL, Running

from asr_serve.api.cli.backends import RemoteTranscriber
from asr_serve.config import EngineConfig, ServeConfig
from asr_serve.decoding.language_model.kneser_ney import train
from asr_serve.decoding.language_model.ngram_files import write_ngrams
from asr_serve.errors import Refused
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card
from asr_serve.server.engine_registry import open_engine
from asr_serve.text.tokenizers import load_tokenizer, sentence_encoder

ROUTE = "/v1/audio/transcriptions"
CHOSEN = {"language_model": "spoken", "language_model_weight": "1", "beam": "4"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a language model that expects other words than are said."""
    path = tmp_path_factory.mktemp("models") / "spoken.ngram.safetensors"
    split = sentence_encoder(load_tokenizer(store.resolve(asr_card(MODEL), None)))
    write_ngrams(train([split("Ever dried. Ever failed. No matter. Try again. Fail again. Fail better.")] * 2, 3), path)
    engine = EngineConfig(language_models=(f"spoken={path}",))
    config = ServeConfig(
        model=MODEL, device="cpu", dtype="fp32", turn_model="none", engine_threads=1, max_beam=5, engine=engine
    )
    started = Running(config, open_engine)
    yield started
    started.expect_empty()
    loaded = started.engines.get()
    started.stop()
    loaded.client.close()


def ask(running: Running, clip: Path, route: str = ROUTE, **data: Any) -> dict[str, Any]:
    return dict(running.http.post(route, files={"file": clip.read_bytes()}, data=data).json())


def test_a_form_names_one(running: Running, beckett: Path) -> None:
    assert ask(running, beckett, beam="4")["text"].startswith("Ever tried")
    assert ask(running, beckett, **CHOSEN)["text"].startswith("Ever dried")
    # Before the file is there, the name of a weight's language model may still come.
    files = {"language_model_weight": (None, "1"), "file": beckett.read_bytes()}
    sent = running.http.post(ROUTE, files=files | {"language_model": (None, "spoken"), "beam": (None, "4")})
    assert sent.json()["text"].startswith("Ever dried")


def test_models_say_which_they_have(running: Running) -> None:
    assert running.http.get(f"/v1/models/{MODEL}").json()["language_models"] == ["spoken"]


@pytest.mark.parametrize(
    ("route", "data", "param", "message"),
    [
        (ROUTE, CHOSEN | {"language_model": "spokn"}, "language_model", "did you mean 'spoken'"),
        (ROUTE, CHOSEN | {"language_model_weight": "5"}, "language_model_weight", "0 to 4"),
        (ROUTE, {"language_model_weight": "1"}, "language_model_weight", "without language_model"),
        (ROUTE, {"language_model": "spoken"}, "beam", "2 or more"),
        (ROUTE, CHOSEN | {"language_model": "x" * 201}, "language_model", "200"),
        ("/asr", {"language_model": "spoken"}, "beam", "2 or more"),
    ],
)
def test_what_cannot_be_is_refused(
    running: Running, beckett: Path, route: str, data: dict[str, str], param: str, message: str
) -> None:
    error = ask(running, beckett, route, **data)["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_a_stream_of_a_model_without_streaming_is_refused(running: Running, beckett: Path) -> None:
    with (
        RemoteTranscriber(running.url, None, {"language_model": "spoken"}) as there,
        pytest.raises(Refused, match="decodes live speech greedily"),
    ):
        there.listen(str(beckett), 16_000, lambda result: None, print)
