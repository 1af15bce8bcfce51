"""Pipeline files: TOML that names the stages through which each segment of a recording passes.

Everything that can be known without loading a model is checked here, and told with its line and key.
"""

from __future__ import annotations

import re
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import msgspec

from asr_serve.config import EngineConfig
from asr_serve.decoding.search_options import MAX_BEAMS, MAX_HYPOTHESES
from asr_serve.errors import OptionError, SourceNotFound, UnknownModel
from asr_serve.models.decoding_graph import GRAPH_FILE
from asr_serve.models.registry import AsrCard, asr_card
from asr_serve.pipelines.stages.condition import Condition, parse_condition
from asr_serve.types import suggest_name

SHIPPED = Path(__file__).parent / "shipped"
"""Folder of the pipelines that come with this package."""
SUFFIX = ".toml"
MAX_STAGES = 16
MAX_FILE_BYTES = 1 << 16


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
    """Choice among the n-best list of the recognizer before, by a language model. Several in a row add up: the next
    one reads the best entries of the one before, with their new scores."""

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
    folder: Path
    """Folder of the file, to which its paths are relative."""

    @property
    def recognizers(self) -> dict[int, RecognizeStage]:
        """Recognizers by the index of their stage; the first stage is one."""
        return {index: stage for index, stage in enumerate(self.stages) if isinstance(stage, RecognizeStage)}

    def path(self, written: str) -> Path:
        """Returns the path that a stage names."""
        return self.folder / Path(written).expanduser()

    def hypotheses(self, index: int) -> int:
        """Most entries of the n-best list of stage `index` that the rescoring stages after it read; 1: none."""
        return max((stage.hypotheses for stage in self._rescoring(index)), default=1)

    def engine_config(self, index: int, config: EngineConfig) -> EngineConfig:
        """Returns the settings of the engine of stage `index`, a recognizer, with its decoding graph, whose search
        lists its hypotheses."""
        stage = self.recognizers[index]
        beams = [stage.lattice_beam for stage in self._rescoring(index) if stage.lattice_beam is not None]
        return msgspec.structs.replace(
            config,
            decoding_graph=str(self.path(stage.decoding_graph)) if stage.decoding_graph else config.decoding_graph,
            beam=max(config.beam, self.hypotheses(index)),
            graph_lattice_beam=max(beams, default=config.graph_lattice_beam),
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


def read_pipeline(path: Path) -> PipelineSpec:
    """Reads and checks a pipeline file. Raises OptionError with the line and the key of what is wrong,
    SourceNotFound."""
    try:
        data = path.read_bytes()
    except OSError as failure:
        raise SourceNotFound(f"the pipeline file {path} cannot be read: {failure}") from failure
    if len(data) > MAX_FILE_BYTES:
        raise OptionError(f"a pipeline file of {len(data)} bytes: {path}", f"up to {MAX_FILE_BYTES}", param="pipeline")
    try:
        text = data.decode()
    except UnicodeDecodeError as failure:
        raise OptionError(f"the pipeline file {path}: {failure}", "UTF-8", param="pipeline") from failure
    return _PipelineReader(path, text).read()


class _PipelineReader:
    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text = path, text
        self._lines = _key_lines(text)

    def read(self) -> PipelineSpec:
        try:
            content = tomllib.loads(self._text)
        except tomllib.TOMLDecodeError as failure:
            message, _, place = str(failure).partition(" (at line ")
            line = int(place.partition(",")[0]) if place else self._text.count("\n") + 1
            raise self._error(line, "", message, "a TOML file") from failure
        for key in content:
            if key not in ("description", "stage"):
                self._fail(-1, key, f"the key {key!r}", "description, and tables [[stage]]")
        description, tables = content.get("description", ""), content.get("stage", [])
        if not isinstance(description, str):
            self._fail(-1, "description", f"{description!r}", "text")
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self._fail(-1, "stage", f"{str(tables)[:60]}", "tables [[stage]]")
        if not 1 <= len(tables) <= MAX_STAGES:
            raise self._error(1, "stage", f"{len(tables)} stages", f"1 to {MAX_STAGES} tables [[stage]]")
        stages = tuple(self._stage(index, table) for index, table in enumerate(tables))
        self._check_order(stages)
        conditions = tuple(self._condition(index, table.get("when")) for index, table in enumerate(tables))
        cards = self._cards(stages)
        return PipelineSpec(self._path.stem, description, stages, conditions, cards, self._path.parent)

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
            return msgspec.convert(table, stage_type)
        except msgspec.ValidationError as failure:
            message, _, place = str(failure).partition(" - at `$.")
            missing = re.search(r"missing required field `(\w+)`", message)
            key = missing[1] if missing else place.rstrip("`")
            self._fail(index, key, message if missing else f"{table.get(key)!r}", "" if missing else message)

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
                if stage.decoding_graph:
                    self._check_graph(index, stage, card)
            elif isinstance(stage, RescoreStage):
                before = next(each for each in reversed(cards) if each is not None)
                if not before.streaming:
                    allowed = "it comes after a streaming model, whose search has an n-best list"
                    self._fail(index, "kind", f"rescore after {before.name}", allowed)
            cards.append(card)
        return tuple(cards)

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
        line = self._lines.get((index, key)) or self._lines.get((index, "")) or 1
        raise self._error(line, key, came, allowed, todo)

    def _error(self, line: int, key: str, came: str, allowed: str, todo: str = "") -> OptionError:
        place = f"{self._path}, line {line}" + (f", {key}" if key else "")
        return OptionError(f"{place}: {came}", allowed, todo, param="pipeline")


def _key_lines(text: str) -> dict[tuple[int, str], int]:
    """Lines, from 1, of the keys of a TOML file: by the index of their table [[stage]], -1 before the first; a
    table's own line has the key ''. Lines inside strings of several lines are skipped."""
    lines: dict[tuple[int, str], int] = {}
    index, quotes = -1, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if quotes:
            quotes = "" if quotes in line else quotes
            continue
        if re.match(r"\s*\[\[\s*\"?stage\"?\s*\]\]", line):
            index += 1
            lines[index, ""] = number
        elif match := re.match(r"""\s*["']?([\w-]+)["']?\s*=\s*(?P<value>.*)""", line):
            lines.setdefault((index, match[1]), number)
            quotes = next((q for q in ('"""', "'''") if match["value"].count(q) == 1), "")
        elif match := re.match(r"\s*\[\s*([\w-]+)", line):
            lines.setdefault((-1, match[1]), number)
    return lines
