"""Decoding graphs that `asr-serve graph build` writes: engines search them, and return words of their lexicons."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_clients import NEMO, NEMO_MODEL
from live_client import run_session
from typer.testing import CliRunner

import asr_serve
from asr_serve.api.cli import app
from asr_serve.api.library import Model
from asr_serve.audio import read_audio
from asr_serve.config import EngineConfig, ServeConfig
from asr_serve.decoding.language_model.ngram_files import read_ngrams
from asr_serve.decoding.language_model.sentence_scorer import NgramSentenceScorer
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.decoding.wfst.batched_search import BatchedWfstSearch
from asr_serve.decoding.wfst.search import WfstSearch
from asr_serve.engine.builder import AsrCheckpoint, build_chunked
from asr_serve.errors import OptionError, UnsupportedOption, WeightsMissing
from asr_serve.models.checkpoints import store
from asr_serve.models.interfaces import StreamingModel
from asr_serve.models.registry import asr_card
from asr_serve.server.engine_registry import open_engine
from asr_serve.types import LanguageModelChoice
from asr_serve.units import RATE_HZ

pytest.importorskip("kaldifst", reason="kaldifst is not installed: pip install 'asr-serve[build]'")

WAIT_S = 180.0
ARMENIAN = "armspeech-hy"
WORDS = ["add", "pod", "jot", "gas", "dust", "mob", "pots", "vet", "just", "soft", "dogs", "add"]
SENTENCES = ["jot dust", "mob add pots", "gas vet just", "dogs soft pod", "dust dust", "pots"]


def build(folder: Path, sentences: list[str], model: str, *options: str | Path) -> Path:
    """Folder of a graph, made by the commands as a user runs them."""
    (folder / "text.txt").write_text("\n".join(sentences), encoding="utf-8")
    for arguments in (
        ("lm", "build", folder / "text.txt", "--order", "2", "-o", folder / "words.arpa"),
        ("graph", "build", folder / "words.arpa", "--tokens", model, "-o", folder / "graph", *options),
    ):
        result = CliRunner().invoke(app, list(map(str, arguments)))
        assert result.exit_code == 0, result.output
    return folder / "graph"


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("graph"), SENTENCES, NEMO_MODEL, "--weights", NEMO)


def load(graph: Path | None, **settings: object) -> Model:
    config = EngineConfig(use_chunked_inference=True, max_sessions=8, decoding_graph=graph and str(graph), **settings)
    return Model.load(NEMO_MODEL, weights=NEMO, device="cpu", dtype="fp32", turn_model="none", engine=config)


@pytest.fixture(scope="module")
def model(graph: Path) -> Iterator[Model]:
    """Random weights: they babble, whatever the audio, and the graph makes words of it."""
    with load(graph) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def speech(packaged_speech: Path) -> np.ndarray:
    return read_audio(packaged_speech / "two_cities.wav")[: 6 * RATE_HZ]


def test_recordings_are_words_of_the_lexicon(model: Model, speech: np.ndarray) -> None:
    with load(None, head="ctc") as free:
        assert not set(free.transcribe(speech)[0].text.split()) <= set(WORDS)
    (found,) = model.transcribe(speech, words=True)
    assert found.text
    assert set(found.text.split()) <= set(WORDS)
    words = [word for segment in found.segments for word in segment.words]
    assert [word.text for word in words] == found.text.split()
    assert all(0.0 < word.confidence <= 1.0 for word in words)
    assert all(word.start_samples < word.end_samples <= len(speech) for word in words)
    assert all(a.end_samples <= b.start_samples for a, b in itertools.pairwise(words))


def test_live_callers_get_the_same_words(model: Model, speech: np.ndarray) -> None:
    live = run_session(model, speech, words=True)
    assert live.text
    assert set(live.text.split()) <= set(WORDS)
    assert [word.text for segment in live.segments for word in segment.words] == live.text.split()
    assert run_session(model, speech).text == live.text


def test_an_nbest_list_is_of_such_words_too(graph: Path, speech: np.ndarray) -> None:
    with load(graph, beam=6) as wide:
        ticket = wide._client.submit(speech, SearchOptions(hypotheses=6), "bulk", wait=True)
        hypotheses = ticket.future.result(WAIT_S).hypotheses
        texts = [wide.tokenizer.decode(each.tokens) for each in hypotheses]
    assert len(set(texts)) == len(texts) > 1
    assert all(set(text.split()) <= set(WORDS) for text in texts)


@pytest.mark.parametrize(("beam", "kind"), [(1, BatchedWfstSearch), (5, WfstSearch)])
def test_lists_come_from_a_lattice_on_every_device(graph: Path, speech: np.ndarray, beam: int, kind: type) -> None:
    """The search that a GPU would have, here on the CPU: a list is the native search's, to the bit."""
    config = EngineConfig(use_chunked_inference=True, max_sessions=2, decoding_graph=str(graph), beam=beam)
    found = AsrCheckpoint.find(NEMO_MODEL, NEMO).with_graph(str(graph))
    parts = found.build("cpu", "fp32")
    assert isinstance(parts.model, StreamingModel)
    lists = []
    for batched in (True, False):
        runner = build_chunked(parts.model, found.card, parts, config, batched_search=batched)
        session = runner.open_session()
        runner.append_audio(session, speech, 0.0)
        runner.finish_audio(session, 0.0)
        fixed = []
        while ready := runner.schedule(1e9):
            fixed += [token.id for output in runner.step(ready, 0.0) for token in output.result.fixed_tokens]
        lists.append((fixed, session.hypotheses))
        assert isinstance(runner.search, kind if batched else WfstSearch)
        runner.close_session(session)
    if beam > 1:
        assert lists[0] == lists[1]
        assert len(lists[0][1]) > 1
    else:
        words = [[*fixed, *(token.id for token in hypotheses[0].tokens)] for fixed, hypotheses in lists]
        assert words[0] == words[1]


def test_files_have_alternatives_where_requested(graph: Path, model: Model, speech: np.ndarray) -> None:
    with load(graph, beam=6) as wide:
        (found,) = wide.transcribe(speech, n_best=4, words=True)
        assert all(segment.alternatives == () for segment in wide.transcribe(speech)[0].segments)
        with pytest.raises(UnsupportedOption, match=r"n_best=7\. up to 6.* set engine\.beam"):
            wide.transcribe(speech, n_best=7)
    assert found.segments
    for segment in found.segments:
        best, *others = segment.alternatives
        assert (best.text, best.words) == (segment.text, segment.words)
        assert 1 <= len(others) <= 3
        assert len({each.text for each in segment.alternatives}) == len(segment.alternatives)
        scores = [each.score for each in others]
        assert scores == sorted(scores, reverse=True)
        for each in others:
            assert [word.text for word in each.words] == each.text.split()
            assert all(0.0 < word.confidence <= 1.0 for word in each.words)
            assert all(a.end_samples <= b.start_samples for a, b in itertools.pairwise(each.words))
    with pytest.raises(UnsupportedOption, match="lists no other hypothesis"):
        model.transcribe(speech, n_best=2)


def test_an_engine_process_tells_the_server_its_words(graph: Path, speech: np.ndarray) -> None:
    engine = EngineConfig(decoding_graph=str(graph), max_sessions=4)
    config = ServeConfig(
        model=NEMO_MODEL,
        weights=str(NEMO),
        device="cpu",
        dtype="fp32",
        turn_model="none",
        engine_threads=1,
        engine=engine,
    )
    parts = open_engine(NEMO_MODEL, config)
    try:
        tokens = parts.client.submit(speech, SearchOptions(), "bulk", wait=True).future.result(WAIT_S).tokens
        assert parts.tokenizer is not None
        text = parts.tokenizer.decode(tokens)
    finally:
        parts.client.close()
    assert text
    assert set(text.split()) <= set(WORDS)
    assert parts.card.heads == ("wfst",)


def test_a_graph_composed_on_the_fly_finds_the_same(
    graph: Path, model: Model, speech: np.ndarray, tmp_path: Path
) -> None:
    other = build(tmp_path, SENTENCES, NEMO_MODEL, "--weights", NEMO, "--on-the-fly")
    with load(other) as composing:
        assert composing.transcribe(speech)[0].text == model.transcribe(speech)[0].text


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"hotwords": ["dust"]}, "fixed graph of words"),
        ({"language_model": "words"}, "none loaded that is made of the words of its decoding graph"),
        ({"beam": 4}, "engine.graph_beam"),
    ],
)
def test_options_of_other_searches_are_refused(
    model: Model, speech: np.ndarray, options: dict[str, object], error: str
) -> None:
    with pytest.raises(UnsupportedOption, match=error):
        model.transcribe(speech, **options)


def test_graphs_that_do_not_fit_are_refused(graph: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsMissing, match="graph build"):
        load(tmp_path)
    with pytest.raises(OptionError, match="head=rnnt") as refused:
        load(graph, head="rnnt")
    assert refused.value.param == "head"
    for other, message in (("whisper-tiny-en", "no head ctc"), (ARMENIAN, "--tokens armspeech-hy")):
        if store.locate(asr_card(other)) is None:
            pytest.skip(f"no weights of {other}")
        with pytest.raises(OptionError, match=message) as refused:
            AsrCheckpoint.find(other, None).with_graph(str(graph))
        assert refused.value.param == "decoding_graph"


PIPELINE = """
[[stage]]
kind = "recognize"
model = "{model}"
weights = "{weights}"
decoding_graph = "graph"

[[stage]]
kind = "rescore"
language_model = "other.arpa"
hypotheses = 8
weight = 50.0
"""


def test_a_pipeline_rescores_what_a_graph_found(graph: Path, speech: np.ndarray, tmp_path: Path) -> None:
    shutil.copytree(graph, tmp_path / "graph")
    (tmp_path / "mine.toml").write_text(PIPELINE.format(model=NEMO_MODEL, weights=NEMO))
    with load(graph, beam=8) as wide:
        ticket = wide._client.submit(speech, SearchOptions(hypotheses=8), "bulk", wait=True)
        texts = [wide.tokenizer.decode(each.tokens) for each in ticket.future.result(WAIT_S).hypotheses]
    assert len(texts) == 8
    assert texts[5] != texts[0]
    (tmp_path / "text.txt").write_text(f"{texts[5]}\n" * 3)
    made = CliRunner().invoke(
        app, ["lm", "build", f"{tmp_path}/text.txt", "--order", "3", "-o", f"{tmp_path}/other.arpa"]
    )
    assert made.exit_code == 0, made.output
    with asr_serve.load_pipeline(str(tmp_path / "mine.toml"), device="cpu") as pipeline:
        (found,) = pipeline.transcribe(speech)
    assert found.text != texts[0]
    assert set(found.text.split()) <= set(WORDS)


def test_a_language_model_rescores_the_lattice_of_a_graph(graph: Path, speech: np.ndarray, tmp_path: Path) -> None:
    """The engine against all word sequences of the lattice, and a pipeline against the engine."""
    with load(graph, beam=64, graph_lattice_beam=20.0) as wide:
        ticket = wide._client.submit(speech, SearchOptions(hypotheses=64), "bulk", wait=True)
        hypotheses = ticket.future.result(WAIT_S).hypotheses
        texts = [wide.tokenizer.decode(each.tokens) for each in hypotheses]
    assert len(texts) > 10
    (tmp_path / "text.txt").write_text(f"{texts[10]}\n" + "vet soft\n" * 9)
    path = tmp_path / "other.arpa"
    made = CliRunner().invoke(app, ["lm", "build", f"{tmp_path}/text.txt", "--order", "3", "-o", f"{path}"])
    assert made.exit_code == 0, made.output
    scores = NgramSentenceScorer(read_ngrams(path)).score(texts)
    chosen = {"language_model": "other", "language_model_weight": 4.0}
    with load(graph, graph_lattice_beam=20.0, language_models=(f"other={path}",)) as model:
        best = set()
        for weight in (0.0, 1.0, 4.0, 50.0):
            options = SearchOptions(language_model=LanguageModelChoice("other", weight))
            found = model._client.submit(speech, options, "bulk", wait=True).future.result(WAIT_S)
            totals = [each.logprob + weight * score for each, score in zip(hypotheses, scores, strict=True)]
            assert model.tokenizer.decode(found.tokens) == texts[int(np.argmax(totals))]
            best.add(int(np.argmax(totals)))
        assert len(best) > 1
        plain, rescored = model.transcribe(speech)[0].text, model.transcribe(speech, **chosen)[0].text
        assert rescored != plain
        assert run_session(model, speech).text == plain
        live = run_session(model, speech, words=True, **chosen)
        assert [word.text for segment in live.segments for word in segment.words] == live.text.split()
        assert live.text == rescored
    shutil.copytree(graph, tmp_path / "graph")
    text = PIPELINE.format(model=NEMO_MODEL, weights=NEMO).replace(
        "hypotheses = 8", "lattice = true\nlattice_beam = 20"
    )
    (tmp_path / "mine.toml").write_text(text.replace("50.0", "4.0"))
    with asr_serve.load_pipeline(str(tmp_path / "mine.toml"), device="cpu") as pipeline:
        (answer,) = pipeline.transcribe(speech, words=True)
        assert [stage["segments"] for stage in pipeline.describe()["stages"]] == [1, 1]
    assert answer.text == rescored
    words = [word for segment in answer.segments for word in segment.words]
    assert [word.text for word in words] == answer.text.split()
    assert all(a.end_samples <= b.start_samples for a, b in itertools.pairwise(words))


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (f'model = "{NEMO_MODEL}"\ndecoding_graph = "none"\n', "line 4, decoding_graph: no graph.safetensors"),
        ('model = "whisper-tiny-en"\ndecoding_graph = "graph"\n', "line 4, decoding_graph: .*head ctc"),
        ('model = "vosk-small-en"\ndecoding_graph = "graph"\n', "line 4, decoding_graph: .*head ctc"),
    ],
)
def test_a_pipeline_file_is_checked(graph: Path, tmp_path: Path, stage: str, message: str) -> None:
    shutil.copytree(graph, tmp_path / "graph")
    (tmp_path / "mine.toml").write_text(f'[[stage]]\nkind = "recognize"\n{stage}')
    with pytest.raises(OptionError, match=message):
        asr_serve.load_pipeline(str(tmp_path / "mine.toml"))


def test_a_language_model_of_other_words_is_refused_with_its_line(graph: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("altogether different words\n")
    arguments = ["lm", "build", f"{tmp_path}/text.txt", "-o", f"{tmp_path}/other.arpa"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    shutil.copytree(graph, tmp_path / "graph")
    text = PIPELINE.format(model=NEMO_MODEL, weights=NEMO).replace("hypotheses = 8", "lattice = true")
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(OptionError, match=r"mine.toml, line 10, language_model: .*hardly a word in common"):
        asr_serve.load_pipeline(str(tmp_path / "mine.toml"), device="cpu")


# --- real weights -----------------------------------------------------------------------------------------

NAMES = ["հովհաննես", "արտաշես", "գրիգոր", "սամվել", "տիգրան", "շուշանիկ", "գյումրի", "վանաձոր"]
"""Of these the model hears few without a graph."""


@pytest.mark.slow
def test_an_armenian_model_hears_the_sentences_of_its_graph(tmp_path: Path) -> None:
    if store.locate(asr_card(ARMENIAN)) is None:
        pytest.skip("armspeech is not installed: pip install --no-deps --ignore-requires-python armspeech==0.1.4")
    if shutil.which("espeak-ng") is None:
        pytest.skip("no espeak-ng, which speaks Armenian")
    sentences = [f"երեկ մենք տեսանք {name} տանը" for name in NAMES]
    graph = build(tmp_path, [*sentences, "տանը մենք երեկ տեսանք"], ARMENIAN)
    clips = []
    for sentence in sentences:
        subprocess.run(["espeak-ng", "-v", "hy", "-s", "140", "-w", tmp_path / "a.wav", sentence], check=True)
        clips.append(np.pad(read_audio(tmp_path / "a.wav"), 4_000))

    def right(graph: Path | None) -> int:
        engine = EngineConfig(decoding_graph=graph and str(graph), use_chunked_inference=True)
        with asr_serve.load(ARMENIAN, device="cpu", turn_model="none", engine=engine) as model:
            found = [each.text for each in model.transcribe(clips, words=True)]
            if graph is not None:
                assert set(" ".join(found).split()) <= set(" ".join(sentences).split())
                live = run_session(model, clips[2], words=True)
                assert live.text == found[2]
                words = [word for segment in live.segments for word in segment.words]
                assert [word.text for word in words] == live.text.split()
                # The first word begins after the padding, and the last ends before it.
                assert 2_000 < words[0].start_samples < words[-1].end_samples < len(clips[2])
        return sum(text == sentence for text, sentence in zip(found, sentences, strict=True))

    assert right(None) == 0
    assert right(graph) >= 6


@pytest.mark.slow
def test_the_shipped_pipeline_hears_armenian_sentences_by_two_language_models(tmp_path: Path) -> None:
    """The graph has the words without their order; the n-gram model of the pipeline knows the sentences."""
    if store.locate(asr_card(ARMENIAN)) is None:
        pytest.skip("armspeech is not installed: pip install --no-deps --ignore-requires-python armspeech==0.1.4")
    if shutil.which("espeak-ng") is None:
        pytest.skip("no espeak-ng, which speaks Armenian")
    sentences = [f"երեկ մենք տեսանք {name} տանը" for name in NAMES]
    graph = build(tmp_path, [word for sentence in sentences for word in sentence.split()], ARMENIAN)
    (tmp_path / "sentences.txt").write_text("\n".join(sentences), encoding="utf-8")
    arguments = ["lm", "build", f"{tmp_path}/sentences.txt", "--order", "3", "-o", f"{tmp_path}/sentences.arpa"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    clips = []
    for sentence in sentences:
        subprocess.run(["espeak-ng", "-v", "hy", "-s", "140", "-w", tmp_path / "a.wav", sentence], check=True)
        clips.append(np.pad(read_audio(tmp_path / "a.wav"), 4_000))
    engine = EngineConfig(decoding_graph=str(graph))
    with asr_serve.load(ARMENIAN, device="cpu", turn_model="none", engine=engine) as model:
        plain = [each.text for each in model.transcribe(clips)]
    values = f"model={ARMENIAN},graph={graph},language_model={tmp_path / 'sentences.arpa'}"
    with asr_serve.load_pipeline(f"ctc-graph-lm,{values}") as pipeline:
        rescored = [each.text for each in pipeline.transcribe(clips)]
    right = [sum(a == b for a, b in zip(texts, sentences, strict=True)) for texts in (plain, rescored)]
    assert right[1] > right[0]
    assert right[1] >= 6
