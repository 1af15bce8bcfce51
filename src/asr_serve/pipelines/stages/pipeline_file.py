"""Pipeline files: TOML that names the stages through which each segment of a recording passes.

Everything that can be known without loading a model is checked here, and told with its line and key.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import msgspec

from asr_serve.config import EngineConfig
from asr_serve.decoding.language_model.packaged_models import CAUSAL_MODELS, PACKAGED_NGRAMS, packaged_ngram_path
from asr_serve.decoding.search_options import MAX_BEAMS, MAX_HYPOTHESES
from asr_serve.errors import AsrServeError, MissingOption, OptionError, SourceNotFound, UnknownModel
from asr_serve.models.decoding_graph import GRAPH_FILE
from asr_serve.models.registry import AsrCard, asr_card
from asr_serve.pipelines.stages.condition import Condition, parse_condition
from asr_serve.toml_file import describe_invalid, read_toml
from asr_serve.types import LanguageModelChoice, suggest_name

SHIPPED = Path(__file__).parent / "shipped"
"""Folder of the pipelines that come with this package."""
SUFFIX = ".toml"
MAX_STAGES = 16
DTYPES = ("auto", "fp32", "bf16")
PATH_KEYS = ("weights", "decoding_graph", "language_model")
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class RecognizeStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="recognize"):
    """Recognition of the segment by a model. The first stage is one; a later one replaces the answer, unless it finds
    no speech."""

    model: str
    when: str = ""
    beam: Annotated[int, msgspec.Meta(ge=1, le=MAX_BEAMS)] = 1
    """Beam width of a model with a decoder."""
    device: str = "auto"
    dtype: str = "auto"
    weights: str = ""
    """Folder of a checkpoint, relative to the file."""
    decoding_graph: str = ""
    """Folder of a decoding graph for a streaming model with the head ctc, relative to the file."""


class RescoreStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="rescore"):
    """Choice among the n-best list of the recognizer before, or in its lattice, by a language model. Several in a row
    add up: the next one reads the best entries of the one before, with their new scores."""

    language_model: str
    """N-gram file, or `.gguf` file of a causal model, relative to the pipeline file; or a packaged model's name."""
    when: str = ""
    hypotheses: Annotated[int, msgspec.Meta(ge=2, le=MAX_HYPOTHESES)] = 10
    """Most entries of the n-best list."""
    weight: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.5
    """Factor on the natural-log probability by the language model, which is added to that of the search."""
    word_bonus: Annotated[float, msgspec.Meta(ge=-100, le=100)] = 0.0
    """Addition for each word: without it a heavy language model prefers short texts."""
    lattice_beam: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    """Distance of the last entries of the n-best list from the best, as a natural log: the recognizer's
    `engine.graph_lattice_beam`. None: the recognizer's own."""
    lattice: bool = False
    """Whether the engine of the recognizer rescores its whole lattice, by an n-gram model of words."""


class DropStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="drop"):
    """Removal of the segments for which the condition holds."""

    when: str


class ItnStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="itn"):
    """Written form of numbers, dates and money: inverse text normalization of all segments. The last stage."""


StageSpec = RecognizeStage | RescoreStage | DropStage | ItnStage
STAGE_TYPES: dict[str, type[StageSpec]] = {
    "recognize": RecognizeStage,
    "rescore": RescoreStage,
    "drop": DropStage,
    "itn": ItnStage,
}


class PipelineSpec(NamedTuple):
    """Checked pipeline file."""

    name: str
    """Name of the file without its suffix."""
    description: str
    stages: tuple[StageSpec, ...]
    conditions: tuple[Condition | None, ...]
    """Condition of each stage; None: it always runs."""
    cards: tuple[AsrCard | None, ...]
    """Card of each stage's model; None where it has none."""
    file: Path
    """The file, to whose folder its paths are relative."""
    lines: Mapping[tuple[int, str], int]
    """Lines of the keys, see `_key_lines`."""

    @property
    def folder(self) -> Path:
        return self.file.parent

    @property
    def devices(self) -> tuple[tuple[str, str], ...]:
        """Devices that a machine may lack, each with its place in the file."""
        return tuple(
            (stage.device, _place(self.file, self.lines, index, "device"))
            for index, stage in self.recognizers.items()
            if stage.device.startswith("cuda")
        )

    @contextlib.contextmanager
    def located_errors(self, index: int, key: str) -> Iterator[None]:
        """Raises errors from inside with the line of a key in stage `index`."""
        try:
            yield
        except AsrServeError as failure:
            raise failure.located(_place(self.file, self.lines, index, key)) from failure

    @contextlib.contextmanager
    def located_loading_errors(self, index: int) -> Iterator[None]:
        """Raises errors of loading the model of stage `index`, with the line of the key that they are about."""
        stage = self.recognizers[index]
        try:
            yield
        except AsrServeError as failure:
            paths = {key: value for key in ("weights", "decoding_graph") if (value := getattr(stage, key))}
            named = next((key for key, value in paths.items() if str(self.path(value)) in failure.came), "model")
            key = failure.param if failure.param is not None and (index, failure.param) in self.lines else named
            raise failure.located(_place(self.file, self.lines, index, key)) from failure

    @property
    def recognizers(self) -> dict[int, RecognizeStage]:
        """Recognizers by the index of their stage; the first stage is one."""
        return {index: stage for index, stage in enumerate(self.stages) if isinstance(stage, RecognizeStage)}

    def path(self, written: str) -> Path:
        """Returns the path that a stage names."""
        return self.folder / Path(written).expanduser()

    def hypotheses(self, index: int) -> int:
        """Most entries of the n-best list of stage `index` that the rescoring stages after it read; 1: none."""
        return max((stage.hypotheses for stage in self._rescoring(index) if not stage.lattice), default=1)

    def language_model_path(self, stage: RescoreStage) -> Path:
        """Returns the file of an n-gram model. Raises WeightsMissing, WeightsCorrupt for a packaged one."""
        if stage.language_model in PACKAGED_NGRAMS:
            return packaged_ngram_path(stage.language_model)
        return self.path(stage.language_model)

    def lattice_model(self, index: int) -> LanguageModelChoice | None:
        """Language model, under its name in the engine, that rescores the lattices of stage `index`; None: none."""
        stage = next(iter(self._rescoring(index)), None)
        return LanguageModelChoice(f"stage-{index + 2}", stage.weight) if stage is not None and stage.lattice else None

    def check_lattice_model(self, index: int, card: AsrCard) -> None:
        """Raises OptionError where the loaded model of stage `index` cannot rescore its lattices, as the next stage
        asks."""
        choice = self.lattice_model(index)
        if choice is not None and choice.name not in card.language_models:
            with self.located_errors(index + 1, "language_model"):
                raise OptionError(
                    f"a language model that has hardly a word in common with {card.name}, or a search that keeps no "
                    "lattice",
                    "a model of words as the decoding graph writes them, and a search on the CPU",
                    'device = "cpu" for the recognizer; asr-serve lm build makes such a model from text',
                )

    def engine_config(self, index: int, config: EngineConfig) -> EngineConfig:
        """Returns the settings of the engine of stage `index`, a recognizer, with its decoding graph, whose search
        lists its hypotheses."""
        stage, models = self.recognizers[index], config.language_models
        if (choice := self.lattice_model(index)) is not None:
            models = (*models, f"{choice.name}={self.language_model_path(self._rescoring(index)[0])}")
        beams = [stage.lattice_beam for stage in self._rescoring(index) if stage.lattice_beam is not None]
        return msgspec.structs.replace(
            config,
            decoding_graph=str(self.path(stage.decoding_graph)) if stage.decoding_graph else config.decoding_graph,
            beam=max(config.beam, self.hypotheses(index)),
            graph_lattice_beam=max(beams, default=config.graph_lattice_beam),
            language_models=models,
        )

    def _rescoring(self, index: int) -> list[RescoreStage]:
        """Rescoring stages that follow stage `index`, up to another one."""
        return [
            stage
            for stage in takewhile(lambda stage: isinstance(stage, RescoreStage), self.stages[index + 1 :])
            if isinstance(stage, RescoreStage)
        ]


def shipped_pipelines() -> list[str]:
    """Names of the pipelines that come with this package."""
    return sorted(path.stem for path in SHIPPED.glob(f"*{SUFFIX}"))


def open_pipeline(given: str) -> PipelineSpec:
    """Reads and checks a pipeline that is given by its name or path and the values of its variables:
    `NAME,VARIABLE=VALUE,...`. Raises as `find_pipeline` and `read_pipeline` do."""
    name, *pairs = re.split(r",(?=[A-Za-z_]\w*=)", given)
    values: dict[str, str] = {}
    for variable, value in (pair.split("=", 1) for pair in pairs):
        if variable in values:
            raise OptionError(
                f"two values of the variable {variable} of {name}", "each variable once", param="pipeline"
            )
        values[variable] = value
    return read_pipeline(find_pipeline(name), values)


def find_pipeline(name: str) -> Path:
    """Returns the file of a shipped pipeline, or of a path that ends in .toml. Raises OptionError, SourceNotFound."""
    if name.endswith(SUFFIX):
        path = Path(name).expanduser()
        if not path.is_file():
            raise SourceNotFound(f"there is no pipeline file {path}", todo="check the path")
        return path
    if name not in (shipped := shipped_pipelines()):
        raise OptionError(
            f"unknown pipeline {name[:60]!r}",
            f"allowed: {', '.join(shipped)}, or a path that ends in {SUFFIX}",
            suggest_name(name, shipped),
            param="pipeline",
        )
    return SHIPPED / f"{name}{SUFFIX}"


def read_pipeline(path: Path, variables: Mapping[str, str] | None = None) -> PipelineSpec:
    """Reads and checks a pipeline file. `variables`: values of those that it declares; paths in them are relative to
    the working directory. Raises OptionError with the line and the key of what is wrong, MissingOption for a variable
    without a value, SourceNotFound."""
    return _PipelineReader(path, *read_toml(path, "pipeline", "pipeline"), variables or {}).read()


class _PipelineReader:
    def __init__(self, path: Path, text: str, content: dict[str, Any], variables: Mapping[str, str]) -> None:
        self._path, self._content, self._variables = path, content, variables
        self._lines = _key_lines(text)

    def read(self) -> PipelineSpec:
        content = self._content
        for key in content:
            if key not in ("description", "variables", "stage"):
                allowed = "description, a table [variables], and tables [[stage]]"
                self._fail(
                    -1, key, f"the key {key!r}", allowed, suggest_name(key, ["description", "variables", "stage"])
                )
        description, tables = content.get("description", ""), content.get("stage", [])
        if not isinstance(description, str):
            self._fail(-1, "description", f"{description!r}", "text")
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self._fail(-1, "stage", f"{str(tables)[:60]}", "tables [[stage]]")
        if not 1 <= len(tables) <= MAX_STAGES:
            raise self._error(1, "stage", f"{len(tables)} stages", f"1 to {MAX_STAGES} tables [[stage]]")
        self._check_variables(content.get("variables", {}))
        tables = [self._with_values(index, table) for index, table in enumerate(tables)]
        stages = tuple(self._stage(index, table) for index, table in enumerate(tables))
        self._check_order(stages)
        conditions = tuple(self._condition(index, table.get("when")) for index, table in enumerate(tables))
        cards = self._cards(stages)
        return PipelineSpec(self._path.stem, description, stages, conditions, cards, self._path, self._lines)

    def _check_variables(self, declared: Any) -> None:
        if not isinstance(declared, dict) or not all(isinstance(text, str) for text in declared.values()):
            self._fail(-1, "variables", f"{str(declared)[:60]}", 'a table of texts: name = "what it is"')
        self._declared: dict[str, str] = declared
        for name in self._variables:
            if name not in declared:
                raise OptionError(
                    f"the variable {name} of the pipeline {self._path.stem}",
                    f"it has {', '.join(declared) or 'none'}",
                    suggest_name(name, declared.keys()),
                    param="pipeline",
                )
        if missing := [name for name in declared if not self._variables.get(name)]:
            values = ",".join(f"{name}={self._variables.get(name) or '...'}" for name in declared)
            raise MissingOption(
                f"the pipeline {self._path.stem} needs values for {len(missing)} variables",
                "; ".join(f"{name}: {declared[name]}" for name in missing),
                f"write them behind its name: {self._path.stem},{values}",
                param="pipeline",
            )

    def _with_values(self, index: int, table: dict[str, Any]) -> dict[str, Any]:
        """Table of a stage with the values of its variables."""
        return {
            key: self._value(index, key, value) if isinstance(value, str) else value for key, value in table.items()
        }

    def _value(self, index: int, key: str, text: str) -> str:
        for name in _VARIABLE.findall(text):
            if name not in self._declared:
                came, allowed = f"the variable {name}", f"those of [variables]: {', '.join(self._declared) or 'none'}"
                self._fail(index, key, came, allowed, suggest_name(name, self._declared.keys()))
        value = _VARIABLE.sub(lambda match: self._variables[match[1]], text)
        packaged = key == "language_model" and value in (*CAUSAL_MODELS, *PACKAGED_NGRAMS)
        return (
            str(Path(value).expanduser().absolute()) if value != text and key in PATH_KEYS and not packaged else value
        )

    def _stage(self, index: int, table: dict[str, Any]) -> StageSpec:
        kind = table.get("kind")
        if not isinstance(kind, str) or kind not in STAGE_TYPES:
            came = "no kind" if kind is None else f"the kind {kind!r}"
            self._fail(index, "kind", came, f"one of {', '.join(STAGE_TYPES)}", suggest_name(kind, list(STAGE_TYPES)))
        stage_type = STAGE_TYPES[kind]
        for key in table:
            if key != "kind" and key not in stage_type.__struct_fields__:
                allowed = ", ".join(stage_type.__struct_fields__) or "kind alone"
                came = f"the key {key!r} of a stage {kind}"
                self._fail(index, key, came, allowed, suggest_name(key, stage_type.__struct_fields__))
        try:
            stage = msgspec.convert(table, stage_type)
            if isinstance(stage, RescoreStage) and stage.lattice:
                self._check_lattice(index, table, stage)
            return stage
        except msgspec.ValidationError as failure:
            self._fail(index, *describe_invalid(failure, table, stage_type))

    def _check_lattice(self, index: int, table: dict[str, Any], stage: RescoreStage) -> None:
        """Checks a stage that the engine of the recognizer before carries out."""
        for key in ("when", "hypotheses", "word_bonus"):
            if key in table:
                allowed = "weight and lattice_beam: the engine rescores the whole lattice of each segment"
                self._fail(index, key, f"{key} beside lattice = true", allowed, "leave one of them out")
        if stage.language_model in CAUSAL_MODELS or stage.language_model.endswith(".gguf"):
            came, allowed = f"{stage.language_model} with lattice = true", "an n-gram model of words"
            todo = "leave lattice out: a causal model rescores the n-best list"
            self._fail(index, "language_model", came, allowed, todo)

    def _check_order(self, stages: tuple[StageSpec, ...]) -> None:
        for index, stage in enumerate(stages):
            before = stages[index - 1] if index else None
            match stage:
                case RecognizeStage() if not index and stage.when:
                    self._fail(index, "when", "a condition of the first stage", "none: there is nothing to compare yet")
                case RecognizeStage() if stage.model in {
                    each.model for each in stages[:index] if isinstance(each, RecognizeStage)
                }:
                    self._fail(index, "model", f"{stage.model} a second time", "each model once")
                case RecognizeStage() if index and not stage.when:
                    todo = 'like when = "confidence < 0.9"'
                    self._fail(index, "when", "a second recognizer without a condition", "one that says when", todo)
                case RescoreStage() if not isinstance(before, RecognizeStage | RescoreStage):
                    allowed = "it comes right after the recognizer whose n-best list it reads, or another rescore"
                    self._fail(index, "kind", "rescore", allowed)
                case RescoreStage(lattice=True) if not isinstance(before, RecognizeStage):
                    allowed = "it comes right after the recognizer"
                    self._fail(index, "lattice", "lattice = true after another rescore", allowed, "put it before that")
                case ItnStage() if index != len(stages) - 1:
                    self._fail(index, "kind", "itn", "it is the last stage")
                case DropStage() | ItnStage() if not index:
                    self._fail(index, "kind", f"{stage.__struct_config__.tag} first", "recognize")

    def _condition(self, index: int, text: str | None) -> Condition | None:
        if text is None:
            return None
        try:
            return parse_condition(text)
        except OptionError as failure:
            self._fail(index, "when", failure.came, failure.allowed, failure.todo)

    def _cards(self, stages: tuple[StageSpec, ...]) -> tuple[AsrCard | None, ...]:
        cards: list[AsrCard | None] = []
        for index, stage in enumerate(stages):
            card = None
            if isinstance(stage, RecognizeStage):
                try:
                    card = asr_card(stage.model)
                except UnknownModel as failure:
                    self._fail(index, "model", failure.came, failure.allowed, failure.todo)
                if card.streaming and stage.beam != 1:
                    came = f"beam={stage.beam} of the streaming model {stage.model}"
                    allowed = "only attention decoders, like Whisper, have a beam for each segment"
                    todo = "leave it out; a rescore stage widens the search to its hypotheses, and so does engine.beam"
                    self._fail(index, "beam", came, allowed, todo)
                self._check_device(index, stage)
                if stage.decoding_graph:
                    self._check_graph(index, stage, card)
                if stage.weights and not (folder := self._path.parent / Path(stage.weights).expanduser()).exists():
                    self._fail(index, "weights", f"there is nothing at {folder}", "", "check the path")
            elif isinstance(stage, RescoreStage):
                before = next(each for each in reversed(cards) if each is not None)
                if not before.streaming:
                    allowed = "it comes after a streaming model, whose search has an n-best list"
                    self._fail(index, "kind", f"rescore after {before.name}", allowed)
                recognizer = stages[index - 1]
                if (
                    stage.lattice
                    and isinstance(recognizer, RecognizeStage)
                    and not (recognizer.decoding_graph or before.heads == ("wfst",))
                ):
                    came = f"lattice = true after {before.name}"
                    allowed = "a model that searches a decoding graph: its search alone has a lattice of words"
                    todo = "give the recognizer a decoding_graph, or leave lattice out"
                    self._fail(index, "lattice", came, allowed, todo)
            cards.append(card)
        return tuple(cards)

    def _check_device(self, index: int, stage: RecognizeStage) -> None:
        """Checks names; whether this machine has the device is known only where torch is loaded."""
        if re.fullmatch(r"auto|cpu|cuda(:\d+)?", stage.device) is None:
            allowed = "auto, cpu, cuda, or cuda:N"
            self._fail(
                index,
                "device",
                f"device {stage.device!r}",
                allowed,
                suggest_name(stage.device, ["auto", "cpu", "cuda"]),
            )
        if stage.dtype not in DTYPES:
            self._fail(index, "dtype", f"dtype {stage.dtype!r}", ", ".join(DTYPES), suggest_name(stage.dtype, DTYPES))

    def _check_graph(self, index: int, stage: RecognizeStage, card: AsrCard) -> None:
        if not card.streaming or "ctc" not in card.heads:
            came = f"a decoding graph of {card.name}"
            self._fail(index, "decoding_graph", came, "streaming models with the head ctc have one", "leave it out")
        folder = self._path.parent / Path(stage.decoding_graph).expanduser()
        if not (folder / GRAPH_FILE).is_file():
            came, allowed = f"no {GRAPH_FILE} in {folder}", "a folder that `asr-serve graph build` wrote"
            self._fail(index, "decoding_graph", came, allowed)

    def _fail(self, index: int, key: str, came: str, allowed: str, todo: str = "") -> NoReturn:
        """Raises the error of a key in stage `index`, -1: outside of stages."""
        place = _place(self._path, self._lines, index, key)
        raise OptionError(f"{place}: {came}", allowed, todo, param="pipeline")

    def _error(self, line: int, key: str, came: str, allowed: str, todo: str = "") -> OptionError:
        place = f"{self._path}, line {line}" + (f", {key}" if key else "")
        return OptionError(f"{place}: {came}", allowed, todo, param="pipeline")


def _place(path: Path, lines: Mapping[tuple[int, str], int], index: int, key: str) -> str:
    """Place of a key in stage `index`, -1: outside of stages, as an error tells it."""
    line = lines.get((index, key)) or lines.get((index, "")) or 1
    return f"{path}, line {line}" + (f", {key}" if key else "")


def _key_lines(text: str) -> dict[tuple[int, str], int]:
    """Lines, from 1, of the keys of a TOML file: by the index of their table [[stage]], -1 before the first; a
    table's own line has the key ''. Lines inside strings of several lines are skipped."""
    lines: dict[tuple[int, str], int] = {}
    stages, index, quotes = -1, -1, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if quotes:
            quotes = "" if quotes in line else quotes
            continue
        if re.match(r"\s*\[\[\s*\"?stage\"?\s*\]\]", line):
            index = stages = stages + 1
            lines[index, ""] = number
        elif match := re.match(r"""\s*["']?([\w-]+)["']?\s*=\s*(?P<value>.*)""", line):
            lines.setdefault((index, match[1]), number)
            quotes = next((q for q in ('"""', "'''") if match["value"].count(q) == 1), "")
        elif match := re.match(r"\s*\[\s*([\w-]+)", line):
            index = -1
            lines.setdefault((index, match[1]), number)
    return lines
