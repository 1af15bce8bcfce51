"""Pipeline files and their stages: errors by line, conditions, which answer is taken, order, cancelling, closing."""

from __future__ import annotations

import importlib.util
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_serve.config import EngineConfig
from asr_serve.decoding.hypothesis import Recognition, RecognitionHypothesis
from asr_serve.decoding.language_model.kneser_ney import train
from asr_serve.decoding.language_model.sentence_scorer import UNKNOWN_LOGPROB, NgramSentenceScorer
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.client import EngineClient, Ticket
from asr_serve.engine.request import RecognitionRequest
from asr_serve.errors import (
    AsrServeError,
    AtCapacity,
    Cancelled,
    EngineClosed,
    MissingOption,
    OptionError,
    ProgramMissing,
    SourceNotFound,
    StepFailed,
    UnsupportedOption,
    WeightsCorrupt,
    WeightsMissing,
)
from asr_serve.models.checkpoints import store
from asr_serve.models.decoding_graph import GRAPH_FILE
from asr_serve.models.registry import asr_card
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.pipelines.stages.condition import SegmentMeasures, parse_condition
from asr_serve.pipelines.stages.language_models import load_scorer, load_scorers
from asr_serve.pipelines.stages.pipeline_file import (
    PipelineSpec,
    RecognizeStage,
    RescoreStage,
    open_pipeline,
    read_pipeline,
    shipped_pipelines,
)
from asr_serve.pipelines.stages.rescoring import rescore
from asr_serve.pipelines.stages.stage_files import check_files
from asr_serve.pipelines.stages.staged_recognizer import StagedRecognizer, StageEngine
from asr_serve.text.normalization import wetext_grammar
from asr_serve.types import LanguageModelChoice

WAIT_S = 30.0
CHAIN = '[[stage]]\nkind = "recognize"\nmodel = "vosk-small-en"\n'
WHISPER = '[[stage]]\nkind = "recognize"\nmodel = "whisper-tiny-en"\nwhen = "confidence < 0.8"\n'
LATTICE = '[[stage]]\nkind = "rescore"\nlanguage_model = "x"\nlattice = true\n'
RESCORE = '[[stage]]\nkind = "rescore"\nlanguage_model = "x"\nhypotheses = 7\nweight = 1.0\n'


def spec_of(tmp_path: Path, text: str) -> PipelineSpec:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return read_pipeline(path)


# --- files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("[[stage]\n", "line 1", "TOML"),
        (CHAIN + "when = [\n", "line 5", "TOML"),
        ("", "line 1, stage", "0 stages"),
        ("name = 'x'\n" + CHAIN, "line 1, name", "description"),
        ("# a comment\n[[stage]]\nmodel = 'vosk-small-en'\n", "line 2, kind", "no kind"),
        ("[[stage]]\nkind = 'recognise'\n", "line 2, kind", "did you mean 'recognize'"),
        ("[[stage]]\nkind = 'recognize'\n", "line 1, model", "missing"),
        ("[[stage]]\nkind = 'recognize'\nmodel = 'vosk-smal-en'\n", "line 3, model", "vosk-small-en"),
        (CHAIN + "beem = 3\n", "line 4, beem", "did you mean 'beam'"),
        (CHAIN + "beam = 'wide'\n", "line 4, beam", "a whole number, 1 to "),
        (CHAIN + "beam = 4\n", "line 4, beam", "only attention decoders"),
        (CHAIN + 'when = "confidence < 1"\n', "line 4, when", "first stage"),
        (CHAIN + WHISPER.replace("confidence", "confidance"), "line 7, when", "did you mean 'confidence'"),
        (CHAIN + WHISPER.replace('when = "confidence < 0.8"\n', ""), "line 4, when", "says when"),
        (CHAIN + WHISPER + WHISPER, "line 10, model", "each model once"),
        (CHAIN + WHISPER + '[[stage]]\nkind = "rescore"\nlanguage_model = "x"\n', "line 9, kind", "streaming"),
        ('[[stage]]\nkind = "rescore"\nlanguage_model = "x"\n', "line 2, kind", "recognizer"),
        (CHAIN + WHISPER + '[[stage]]\nkind = "drop"\nwhen = "tokens < 1"\n' + RESCORE, "line 12, kind", "rescore"),
        (
            CHAIN + "\n[[stage]]\nkind = 'rescore'\nlanguage_model = 'x'\nweight = -1\n",
            "line 8, weight",
            "a number, 0 to 100",
        ),
        (CHAIN + '[[stage]]\nkind = "itn"\n' + WHISPER, "line 5, kind", "last"),
        ('[[stage]]\nkind = "drop"\nwhen = "tokens < 1"\n', "line 2, kind", "recognize"),
        (CHAIN + 'device = "cuda:x"\n', "line 4, device", "cuda:N"),
        (CHAIN + 'device = "cdua"\n', "line 4, device", "did you mean 'cuda'"),
        (CHAIN + 'dtype = "fp16"\n', "line 4, dtype", "auto, fp32, bf16"),
        (CHAIN + 'weights = "nowhere"\n', "line 4, weights", "check the path"),
        ("descripton = 'x'\n" + CHAIN, "line 1, descripton", "did you mean 'description'"),
        (CHAIN + 'weights = "${folder}"\n', "line 4, weights", "the variable folder"),
        ("variables = 3\n" + CHAIN, "line 1, variables", "a table of texts"),
        (CHAIN + "[variables]\nx = 3\n", "line 4, variables", "a table of texts"),
        (CHAIN + RESCORE + "lattice = true\n", "line 7, hypotheses", "beside lattice = true"),
        (CHAIN + LATTICE + 'when = "tokens > 3"\n', "line 8, when", "beside lattice = true"),
        (CHAIN + LATTICE.replace('"x"', '"gemma3-270m"'), "line 6, language_model", "n-best list"),
        (CHAIN + RESCORE + LATTICE, "line 12, lattice", "right after the recognizer"),
        (CHAIN.replace("vosk-small-en", "armspeech-hy") + LATTICE, "line 7, lattice", "decoding_graph"),
        ('description = """\nmodel = 3\n"""\n' + CHAIN + "model2 = 1\n", "line 7, model2", "model"),
    ],
)
def test_errors_are_told_with_their_line_and_key(tmp_path: Path, text: str, place: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        spec_of(tmp_path, text)
    assert f"mine.toml, {place}" in str(caught.value)
    assert message in str(caught.value)


def test_the_line_of_bytes_that_are_no_utf_8_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(CHAIN.encode() + b'device = "cp\xff"\n')
    with pytest.raises(OptionError, match=r"mine\.toml, line 4: .*UTF-8"):
        read_pipeline(path)


def test_files_are_found_by_name_or_path(tmp_path: Path) -> None:
    assert shipped_pipelines() == ["chain-lm", "chain-then-whisper", "ctc-graph-lm"]
    for name in ("chain-lm", "chain-then-whisper"):
        spec = open_pipeline(name)
        assert spec.name == name
        assert spec.description
    with pytest.raises(OptionError, match="did you mean 'chain-lm'"):
        open_pipeline("chain-lmm")
    with pytest.raises(SourceNotFound):
        open_pipeline(str(tmp_path / "none.toml"))


def test_a_pipeline_asks_for_the_values_of_its_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / GRAPH_FILE).touch()
    monkeypatch.chdir(tmp_path)
    values = ",model=armspeech-hy,graph=made,language_model=a,b=c.arpa"
    spec = open_pipeline("ctc-graph-lm,model=armspeech-hy,graph=made,language_model=words.arpa")
    assert spec.name == "ctc-graph-lm"
    assert spec.recognizers[0].model == "armspeech-hy"
    assert spec.path(spec.recognizers[0].decoding_graph) == tmp_path / "made"
    assert spec.language_model_path(spec.stages[1]) == tmp_path / "words.arpa"
    with pytest.raises(
        MissingOption,
        match=r"2 variables.* graph: a folder.*ctc-graph-lm,model=armspeech-hy,graph=\.\.\.,language_model=",
    ):
        open_pipeline("ctc-graph-lm,model=armspeech-hy")
    with pytest.raises(OptionError, match="did you mean 'graph'"):
        open_pipeline("ctc-graph-lm,grap=made")
    with pytest.raises(OptionError, match="two values of the variable model of ctc-graph-lm"):
        open_pipeline(f"ctc-graph-lm,model=whisper-tiny-en{values}")
    with pytest.raises(OptionError, match="the variable b of"):
        open_pipeline(f"ctc-graph-lm{values}")
    with pytest.raises(OptionError, match=r"line 10, model: .*did you mean 'armspeech-hy'"):
        open_pipeline("ctc-graph-lm,model=armspech-hy,graph=made,language_model=words.arpa")
    with pytest.raises(OptionError, match=r"line 11, decoding_graph: no graph.safetensors in .*nothing"):
        open_pipeline("ctc-graph-lm,model=armspeech-hy,graph=nothing,language_model=words.arpa")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    spec = spec_of(tmp_path, CHAIN + 'weights = "here"\n')
    assert spec.path("here") == tmp_path / "here"
    assert spec.path("/there") == Path("/there")


def test_language_models_are_checked_with_their_line(tmp_path: Path) -> None:
    train([("\u2581the", "\u2581cat")], 2).to_model().save(tmp_path / "tokens.ngram.safetensors")
    (tmp_path / "broken.arpa").write_text("nothing")
    (tmp_path / "broken.gguf").write_text("nothing")
    for name, error, message in (
        ("gone.arpa", WeightsMissing, "asr-serve lm build"),
        ("gone.gguf", WeightsMissing, "GGUF"),
        ("gemma3-270", WeightsMissing, "did you mean 'gemma3-270m'"),
        ("broken.arpa", WeightsCorrupt, "broken.arpa"),
        ("broken.gguf", (WeightsCorrupt, ProgramMissing), ""),
        ("tokens.ngram.safetensors", OptionError, "counts tokens of a recogniser, like \u2581"),
    ):
        spec = spec_of(tmp_path, CHAIN + RESCORE.replace('"x"', f'"{name}"'))
        with pytest.raises(error) as caught:
            load_scorers(spec)
        assert str(caught.value).startswith(f"{tmp_path / 'mine.toml'}, line 6, language_model: ")
        assert message in str(caught.value)
    spec = spec_of(tmp_path, CHAIN + LATTICE.replace('"x"', '"tokens.ngram.safetensors"'))
    with pytest.raises(OptionError, match=r"line 6, language_model: .*counts tokens"):
        load_scorers(spec)


def test_files_and_packages_of_stages_are_checked_with_their_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsMissing, match="line 4, weights: no checkpoint of vosk-small-en"):
        check_files(spec_of(tmp_path, CHAIN + 'weights = "empty"\n'))
    monkeypatch.setattr(store, "locate", lambda card: None)
    with pytest.raises(WeightsMissing, match="line 3, model: the weights of armspeech-hy are not on this machine"):
        check_files(spec_of(tmp_path, CHAIN.replace("vosk-small-en", "armspeech-hy")))
    monkeypatch.undo()
    monkeypatch.setattr(wetext_grammar, "is_wetext_installed", lambda: False)
    checkpoint = tmp_path / "folder"
    checkpoint.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (checkpoint / name).touch()
    with pytest.raises(UnsupportedOption, match=r"line 6, kind: .*wetext"):
        check_files(spec_of(tmp_path, CHAIN + 'weights = "folder"\n[[stage]]\nkind = "itn"\n'))


def test_a_lattice_is_rescored_by_the_engine(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, CHAIN + LATTICE + "weight = 1.5\nlattice_beam = 6\n" + RESCORE)
    assert spec.lattice_model(0) == LanguageModelChoice("stage-2", 1.5)
    config = spec.engine_config(0, EngineConfig())
    assert config.language_model_files == {"stage-2": str(tmp_path / "x")}
    assert (config.graph_lattice_beam, config.beam) == (6, 7)
    with pytest.raises(OptionError, match=r"line 6, language_model: .*keeps no lattice"):
        spec.check_lattice_model(0, asr_card("vosk-small-en"))
    spec.check_lattice_model(0, msgspec.structs.replace(asr_card("vosk-small-en"), language_models=("stage-2",)))


# --- conditions -------------------------------------------------------------------------------------------

MEASURES = SegmentMeasures(confidence=0.5, avg_logprob=-0.7, no_speech_prob=0.0, tokens=3, duration_s=2.0)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("confidence < 0.85", True),
        ("confidence<.5", False),
        ("confidence <= 0.5", True),
        ("tokens == 3 and duration_s != 2", False),
        ("tokens > 3 or avg_logprob >= -7e-1", True),
        ("confidence > 1 and tokens > 1 or tokens > 1", True),  # and binds closer
        ("confidence > 1 and (tokens > 1 or tokens > 1)", False),
        ("((no_speech_prob<1))", True),
    ],
)
def test_conditions_compare(text: str, holds: bool) -> None:
    assert parse_condition(text).holds(MEASURES) is holds


@pytest.mark.parametrize(
    "text",
    [
        "", "confidence", "confidence <", "confidence = 1", "0.5 < confidence", "confidence < tokens",
        "tokens < 1 tokens",
        "(tokens < 1", "tokens < 1)", "not tokens < 1", "__import__('os')", "tokens < 1 and", "and", "tokens.real < 1",
        "(" * 40 + "tokens < 1" + ")" * 40, "tokens < 1 or " * 100 + "tokens < 1", "tokens < nan",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_condition(text)


@given(st.recursive(
    st.builds(lambda n, c: f"tokens {c} {n}", st.integers(0, 6), st.sampled_from(["<", "<=", ">", ">=", "==", "!="])),
    lambda inner: st.builds(lambda a, b, word: f"({a} {word} {b})", inner, inner, st.sampled_from(["and", "or"])),
    max_leaves=8,
))  # fmt: skip
def test_conditions_mean_what_they_mean_in_python(text: str) -> None:
    assert parse_condition(text).holds(MEASURES) is bool(eval(text, {"tokens": 3}))


def test_confidence_is_the_mean_probability() -> None:
    answer = recognition("a b", logprobs=(math.log(0.5), 0.0))
    assert SegmentMeasures.of(answer, 32_000) == SegmentMeasures(0.75, answer.avg_logprob, 0.0, 2, 2.0)
    assert SegmentMeasures.of(recognition(""), 1).confidence == 0.0


# --- stages -----------------------------------------------------------------------------------------------

WORDS = ["", "a", "b", "c", "no", "know", "i", "yes"]


def text_of(tokens: list[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)


def recognition(text: str, **fields: Any) -> Recognition:
    tokens = tuple(WORDS.index(word) for word in text.split())
    fields = {"logprobs": (-0.1,) * len(tokens), "avg_logprob": -0.1} | fields
    return Recognition(tokens, temperature=0.0, finish="stop", compression_ratio=1.0, **fields)


class ScriptedClient:
    """Client of an engine that answers by a function of the audio's first sample, when it is told to."""

    def __init__(self, model: str, answer: Callable[[int], Recognition | AsrServeError]) -> None:
        self.card, self._answer = asr_card(model), answer
        self.requests: list[tuple[int, SearchOptions]] = []
        self.waiting: dict[int, Future[Recognition]] = {}
        self.held = False

    def submit(
        self, pcm: np.ndarray, options: SearchOptions, priority: str, *, admitted: bool, wait: bool, check: Any
    ) -> Ticket:
        check()
        number = len(self.requests)
        self.requests.append((int(pcm[0]), options))
        future = self.waiting[number] = Future()
        if not self.held:
            self.release(number)
        return Ticket(number, future)

    def release(self, number: int) -> None:
        outcome = self._answer(self.requests[number][0])
        future = self.waiting.pop(number)
        if isinstance(outcome, AsrServeError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def cancel(self, ticket: Ticket) -> None:
        if (future := self.waiting.pop(ticket.id, None)) is not None:
            future.set_exception(Cancelled("cancelled"))

    def wake_waiters(self) -> None:
        pass


class HeldBackend:
    """Backend of a client, which answers nothing but what is cancelled."""

    new_live_callers = 32

    def __init__(self, config: EngineConfig, done: Callable[[int], None], stopped: Callable[[], None]) -> None:
        self.card, self._done, self._stopped = asr_card("whisper-tiny-en"), done, stopped
        self.requests: dict[int, RecognitionRequest] = {}
        self.state = "ready"

    def submit(self, utterance: RecognitionRequest) -> None:
        self.requests[utterance.id] = utterance

    def cancel(self, request_id: int) -> None:
        if (request := self.requests.pop(request_id, None)) is not None:
            self._done(request.samples)
            request.future.set_exception(Cancelled("cancelled"))

    def close(self) -> None:
        self._stopped()


def eventually(holds: Callable[[], object]) -> None:
    limit_s = time.monotonic() + WAIT_S
    while not holds() and time.monotonic() < limit_s:
        time.sleep(0.001)
    assert holds()


Start = Callable[..., StagedRecognizer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[StagedRecognizer] = []

    def begin(text: str, *clients: ScriptedClient, **scorers: Any) -> StagedRecognizer:
        spec = spec_of(tmp_path, text)
        indices = [index for index, stage in enumerate(spec.stages) if isinstance(stage, RecognizeStage)]
        engines: Any = {index: StageEngine(client, text_of) for index, client in zip(indices, clients, strict=True)}  # type: ignore[arg-type]
        started.append(StagedRecognizer(spec, engines, {int(name[1:]): each for name, each in scorers.items()}))
        return started[-1]

    yield begin
    for each in started:
        each.close()


def submit(recognizer: StagedRecognizer, first: int = 0) -> Ticket:
    pcm = np.full(16_000, first, np.float32)
    return recognizer.submit(pcm, SearchOptions(language="en"), "bulk", lambda: None)


def result(recognizer: StagedRecognizer, first: int = 0) -> Recognition:
    answer: Recognition = submit(recognizer, first).future.result(WAIT_S)
    return answer


def test_a_cascade_asks_the_second_model_where_the_first_is_not_sure(start: Start) -> None:
    def chain(first: int) -> Recognition:
        return recognition("a", logprobs=(math.log(first / 100),)) if first else recognition("")

    first, second = (
        ScriptedClient("vosk-small-en", chain),
        ScriptedClient("whisper-tiny-en", lambda _: recognition("b c")),
    )
    recognizer = start(CHAIN + WHISPER, first, second)
    answers = {sure: result(recognizer, sure) for sure in (0, 79, 81, 100)}
    assert {sure: text_of(list(answer.tokens)) for sure, answer in answers.items()} == {
        0: "b c",  # nothing was recognized
        79: "b c",
        81: "a",
        100: "a",
    }
    assert recognizer.model_of(answers[79]).card.name == "whisper-tiny-en"
    assert recognizer.model_of(answers[81]).card.name == "vosk-small-en"
    assert [sure for sure, _ in second.requests] == [0, 79]
    assert [stage["segments"] for stage in recognizer.describe()] == [4, 2]


def test_an_implausible_second_answer_does_not_replace_the_first(start: Start) -> None:
    first = ScriptedClient("vosk-small-en", lambda _: recognition("a", logprobs=(-3.0,)))
    for second_answer in (recognition(""), recognition("b", avg_logprob=-3.0)):
        second = ScriptedClient("whisper-tiny-en", lambda _, answer=second_answer: answer)  # type: ignore[misc]
        answer = result(start(CHAIN + WHISPER, first, second))
        assert (text_of(list(answer.tokens)), answer.model) == ("a", "vosk-small-en")
        assert len(second.requests) == 1


def test_answers_belong_to_their_segments_in_any_order(start: Start) -> None:
    first = ScriptedClient("vosk-small-en", lambda n: recognition("a" * (n % 2), times=((n, n),) * (n % 2)))
    second = ScriptedClient("whisper-tiny-en", lambda n: recognition("b", times=((n, n),)))
    recognizer = start(CHAIN + WHISPER, first, second)
    first.held = True
    tickets = [submit(recognizer, n) for n in range(50)]
    order = list(range(50))
    random.Random(3).shuffle(order)
    for number in order:
        first.release(number)
    for n, ticket in enumerate(tickets):
        answer = ticket.future.result(WAIT_S)
        assert (text_of(list(answer.tokens)), answer.times) == ("a" if n % 2 else "b", ((n, n),))


def test_segments_are_dropped_where_a_condition_holds(start: Start) -> None:
    client = ScriptedClient("vosk-small-en", lambda n: recognition("a", logprobs=(-float(n),)))
    recognizer = start(CHAIN + '[[stage]]\nkind = "drop"\nwhen = "confidence < 0.5"\n', client)
    assert result(recognizer, 0).tokens
    assert result(recognizer, 1).tokens == ()


NBEST = recognition(
    "i no",
    hypotheses=(
        RecognitionHypothesis((6, 4), -10.0, (-0.1, -0.2), ((0, 1), (1, 2))),
        RecognitionHypothesis((6, 5), -10.5, (-0.1, -1.2), ((0, 1), (1, 3))),
        RecognitionHypothesis((6,), -20.0, (-0.1,), ((0, 1),)),
    ),
)


def rescored(answer: Recognition, scorer: Any, **keys: float) -> Recognition:
    (found,) = rescore([answer], [text_of], scorer, RescoreStage("x", **keys))  # type: ignore[arg-type]
    return found


def test_rescoring_takes_the_best_sum() -> None:
    scorer = NgramSentenceScorer(train([["i", "know"], ["i", "know"], ["no"]], 2).to_model())
    scores = scorer.score([text_of(list(each.tokens)) for each in NBEST.hypotheses])
    assert scores[1] > scores[0]
    chosen = rescored(NBEST, scorer, weight=1.0)
    best = NBEST.hypotheses[1]
    assert (chosen.tokens, chosen.logprobs, chosen.times) == (best.tokens, best.logprobs, best.times)
    assert chosen.avg_logprob == pytest.approx(-0.65)
    assert [each.logprob for each in chosen.hypotheses] == pytest.approx(
        [-10.5 + scores[1], -10.0 + scores[0], -20.0 + scores[2]]
    )
    assert rescored(NBEST, scorer, weight=0.0).tokens == (6, 4)
    assert rescored(NBEST, scorer, weight=0.0, word_bonus=-20.0).tokens == (6,)
    assert rescored(NBEST, scorer, weight=0.0, word_bonus=-20.0, hypotheses=2).tokens == (6, 4)
    assert rescored(recognition("a"), scorer).tokens == (1,)


def test_the_packaged_ngram_model_is_found_or_told_how_to_get(tmp_path: Path) -> None:
    if importlib.util.find_spec("pocketsphinx") is None:
        with pytest.raises(WeightsMissing, match=r"pip install --no-deps pocketsphinx==5\.1\.1"):
            load_scorer("cmusphinx-en-us", tmp_path)
    else:  # PocketSphinx's own log-probability, of weights that it rounds
        assert load_scorer("cmusphinx-en-us", tmp_path).score(["the cat sat on the mat"]) == pytest.approx(
            [-32.3528], abs=2e-3
        )
    with pytest.raises(WeightsMissing, match=r"there is no language model .*gone\.arpa"):
        load_scorer("gone.arpa", tmp_path)


def test_unknown_words_of_a_model_without_their_symbol_are_finite() -> None:
    model = train([["i", "know"]], 2).to_model()
    closed = NgramSentenceScorer(
        model._replace(words=tuple(f"{word}." if word == "<unk>" else word for word in model.words))
    )
    (known, lower, unknown) = closed.score(["i know", "I KNOW", "i xyz"])
    assert known == lower
    assert -math.inf < unknown < UNKNOWN_LOGPROB


class ScriptedScorer:
    """Language model with these scores of sentences, 0 for others."""

    def __init__(self, scores: dict[str, float] | None = None, fails: bool = False) -> None:
        self.fails, self._scores = fails, {"i know": 1.0} if scores is None else scores
        self.calls: list[list[str]] = []

    def score(self, sentences: list[str]) -> list[float]:
        self.calls.append(sentences)
        if self.fails:
            raise RuntimeError("out of memory")
        return [self._scores.get(sentence, 0.0) for sentence in sentences]


def test_a_rescoring_stage_requests_the_list_it_reads(start: Start) -> None:
    client = ScriptedClient("vosk-small-en", lambda _: NBEST)
    assert result(start(CHAIN + RESCORE, client, s1=ScriptedScorer())).tokens == (6, 5)
    assert client.requests[0][1].hypotheses == 7


def test_alternatives_are_as_many_as_are_rescored(start: Start) -> None:
    chain, whisper = (
        ScriptedClient("vosk-small-en", lambda _: NBEST),
        ScriptedClient("whisper-tiny-en", lambda _: NBEST),
    )
    rescored_all = start(CHAIN + RESCORE, chain, s1=ScriptedScorer())
    assert rescored_all.transcribe_options(TranscribeOptions(n_best=7)).n_best == 7
    with pytest.raises(UnsupportedOption, match=r"n_best=8. up to 7"):
        rescored_all.transcribe_options(TranscribeOptions(n_best=8))
    with pytest.raises(UnsupportedOption, match=r"n_best=2. up to 1"):
        start(CHAIN + RESCORE + WHISPER, chain, whisper, s1=ScriptedScorer()).transcribe_options(
            TranscribeOptions(n_best=2)
        )


def test_rescoring_stages_in_a_row_add_up(start: Start, tmp_path: Path) -> None:
    second = RESCORE.replace("= 7", "= 2")
    text = CHAIN + RESCORE + second + WHISPER
    spec = spec_of(tmp_path, text)
    assert (spec.hypotheses(0), spec.hypotheses(3)) == (7, 1)
    assert spec.engine_config(0, EngineConfig()).beam == 7
    assert spec.engine_config(3, EngineConfig(beam=3)).beam == 3
    client = ScriptedClient("vosk-small-en", lambda _: NBEST)
    first, second_scorer = ScriptedScorer({"i": 9.8, "i no": 0.1}), ScriptedScorer({"i": 0.4})
    # -10.0 + 0.1, -10.5 and -20 + 9.8: the second stage reads "i no" and "i" alone, and adds 0.4 to -10.2.
    assert result(start(CHAIN + RESCORE + second, client, s1=first, s2=second_scorer)).tokens == (6,)
    assert (first.calls, second_scorer.calls) == ([["i no", "i know", "i"]], [["i no", "i"]])


def test_segments_that_wait_are_rescored_together(start: Start) -> None:
    client, scorer = ScriptedClient("vosk-small-en", lambda n: NBEST if n else recognition("a")), ScriptedScorer()
    released, score = threading.Event(), scorer.score

    def held_score(sentences: list[str]) -> list[float]:
        assert released.wait(WAIT_S)
        return score(sentences)

    scorer.score = held_score  # type: ignore[method-assign]
    recognizer = start(CHAIN + RESCORE, client, s1=scorer)
    tickets = [submit(recognizer, n) for n in (1, 1, 0, *[1] * 20)]
    released.set()
    answers = [ticket.future.result(WAIT_S).tokens for ticket in tickets]
    assert answers == [(6, 5), (6, 5), (1,), *[(6, 5)] * 20]
    assert len(scorer.calls) <= 3  # what came first, then up to MAX_RESCORED_SEGMENTS at a time
    assert sum(map(len, scorer.calls)) == 22 * 3


def test_what_fails_fails_its_segment_alone(start: Start) -> None:
    client = ScriptedClient("vosk-small-en", lambda n: NBEST if n else StepFailed("a step failed"))
    scorer = ScriptedScorer(fails=True)
    recognizer = start(CHAIN + RESCORE, client, s1=scorer)
    with pytest.raises(StepFailed, match="a step failed"):
        result(recognizer, 0)
    with pytest.raises(StepFailed, match=r"stage 2, rescore, of mine failed: .*out of memory"):
        result(recognizer, 1)
    scorer.fails = False
    assert result(recognizer, 1).tokens == (6, 5)


def test_cancelled_segments_raise_and_leave_nothing(start: Start) -> None:
    first = ScriptedClient("vosk-small-en", lambda _: recognition(""))
    second = ScriptedClient("whisper-tiny-en", lambda _: recognition("b"))
    recognizer = start(CHAIN + WHISPER, first, second)
    second.held = True
    ticket = submit(recognizer)
    eventually(lambda: second.waiting)
    recognizer.cancel(ticket)
    with pytest.raises(Cancelled):
        ticket.future.result(WAIT_S)
    assert not second.waiting
    recognizer.cancel(ticket)  # once more is allowed


def test_a_later_engine_at_its_limit_stops_no_other_segment(start: Start) -> None:
    first = ScriptedClient("vosk-small-en", lambda n: NBEST if n else recognition(""))
    backends: list[HeldBackend] = []

    def connect(*args: Any) -> Any:
        backends.append(HeldBackend(*args))
        return backends[0]

    second = EngineClient(EngineConfig(max_requests=1), connect)
    (requests,) = (backend.requests for backend in backends)
    try:
        second.submit(np.full(16_000, 9, np.float32))
        recognizer = start(CHAIN + RESCORE + WHISPER, first, second, s1=ScriptedScorer({"i": 11.0}))
        unsure = submit(recognizer, 0)
        assert result(recognizer, 1).tokens == (6,)  # rescored, and sure
        assert not unsure.future.done()
        eventually(lambda: [int(each.pcm[0]) for each in requests.values()] == [9, 0])
        with pytest.raises(AtCapacity):  # callers of the model alone have its limit as before
            second.submit(np.zeros(16_000, np.float32))
        recognizer.cancel(unsure)
        with pytest.raises(Cancelled):
            unsure.future.result(WAIT_S)
        assert [int(each.pcm[0]) for each in requests.values()] == [9]
    finally:
        second.close()


def test_closing_ends_what_is_left(start: Start) -> None:
    client = ScriptedClient("vosk-small-en", lambda _: recognition("a"))
    recognizer = start(CHAIN, client)
    client.held = True
    ticket = submit(recognizer)
    recognizer.close()
    with pytest.raises(EngineClosed):
        ticket.future.result(WAIT_S)
    with pytest.raises(EngineClosed):
        submit(recognizer)
