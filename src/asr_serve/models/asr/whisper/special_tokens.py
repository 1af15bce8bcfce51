"""Special tokens of Whisper: their ids, the tokens that an answer begins with, and suppressed tokens.

Source  arXiv:2212.04356, section 2.3; tests/models/test_whisper_special_tokens.py checks ids and lists against
        the tokenizers' own
"""

from __future__ import annotations

from typing import NamedTuple

from asr_serve.errors import OptionError, UnsupportedOption, WeightsCorrupt
from asr_serve.models.interfaces import PromptOptions

_CODES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur "
    "hr bg lt la mi ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si "
    "km sn yo so af oc ka be tg sd gu am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha "
    "ba jw su yue"
)
LANGUAGES = tuple(_CODES.split())
"""Languages in the order of their tokens. All but the last are in every model; it was added with large-v3."""
ENGLISH_TEXT = 50_256
"""Text tokens of the English models; the multilingual ones have another vocabulary, and one more."""
ENGLISH_VOCABULARY = 51_864
"""Number of tokens of an English model."""
TASKS = 6
"""Number of task tokens: translate, transcribe, start of lm, previous text, no speech, no timestamps."""
BLANK = 220
"""Token of a single space, in both vocabularies."""

NON_SPEECH_ENGLISH: tuple[int, ...] = (
    *(1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90, 91, 92, 93, 357, 366, 438, 532),
    *(685, 705, 796, 930, 1058, 1220, 1267, 1279, 1303, 1343, 1377, 1391, 1635, 1782, 1875, 2162, 2361, 2488, 3467),
    *(4008, 4211, 4600, 4808, 5299, 5855, 6329, 7203, 9609, 9959, 10563, 10786, 11420, 11709, 11907, 13163, 13697),
    *(13700, 14808, 15306, 16410, 16791, 17992, 19203, 19510, 20724, 22305, 22935, 27007, 30109, 30420, 33409, 34949),
    *(40283, 40493, 40549, 47282, 49146),
)
NON_SPEECH: tuple[int, ...] = (
    *(1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90, 91, 92, 93, 359, 503, 522, 542, 873),
    *(893, 902, 918, 922, 931, 1350, 1853, 1982, 2460, 2627, 3246, 3253, 3268, 3536, 3846, 3961, 4183, 4667, 6585),
    *(6647, 7273, 9061, 9383, 10428, 10929, 11938, 12033, 12331, 12562, 13793, 14157, 14635, 15265, 15618, 16553),
    *(16604, 18362, 18956, 20075, 21675, 22520, 26130, 26161, 26435, 28279, 29464, 31650, 32302, 32470, 36865, 42863),
    *(47425, 49870, 50254),
)
"""Tokens of brackets, notes, dashes and the like: annotations of subtitles that are not spoken."""


class SpecialTokens(NamedTuple):
    """Ids by name. Ids below `eot` are text; from `timestamp_begin` on, each id is 20 ms later."""

    eot: int
    sot: int
    languages: dict[str, int]
    translate: int
    transcribe: int
    sot_lm: int
    sot_prev: int
    no_speech: int
    no_timestamps: int
    timestamp_begin: int
    multilingual: bool
    """Whether answers begin with language and task; English vocabularies may have these tokens too."""

    @classmethod
    def of(cls, text_tokens: int, vocab_size: int, timestamps: int) -> SpecialTokens:
        """Computes the ids of a vocabulary: `text_tokens`, end and start, languages, tasks, `timestamps`. Raises
        WeightsCorrupt where the sizes do not match."""
        first = text_tokens + 2
        tasks = vocab_size - timestamps - TASKS
        if not first <= tasks <= first + len(LANGUAGES):
            raise WeightsCorrupt(
                f"vocab_size={vocab_size} leaves {tasks - first} ids for languages",
                f"0 to {len(LANGUAGES)}; published models have 51864, 51865 or 51866 ids",
                "tokens that were added to a Whisper must be taken off again",
            )
        return cls(
            text_tokens,
            text_tokens + 1,
            {code: first + i for i, code in enumerate(LANGUAGES[: tasks - first])},
            tasks,
            tasks + 1,
            tasks + 2,
            tasks + 3,
            tasks + 4,
            tasks + 5,
            vocab_size - timestamps,
            text_tokens != ENGLISH_TEXT and tasks > first,
        )

    @property
    def suppress(self) -> tuple[int, ...]:
        """Suppressed tokens, unless the checkpoint has its own list."""
        if self.eot == ENGLISH_TEXT:
            words = NON_SPEECH_ENGLISH
        else:
            words = NON_SPEECH if self.eot > ENGLISH_TEXT else ()
        control = (self.sot, self.translate, self.transcribe, self.sot_lm, self.sot_prev, self.no_speech)
        return (*words, *control)

    @property
    def suppress_first(self) -> tuple[int, ...]:
        """Tokens suppressed as the first one: an answer is not empty."""
        return (BLANK, self.eot) if self.eot > BLANK else (self.eot,)

    def prompt_tokens(self, options: PromptOptions, longest_prompt: int) -> tuple[int, ...]:
        """Returns the tokens that an answer begins with. See `EncoderDecoderModel.prompt_tokens`."""
        self.validate(options)
        prompt = options.prompt[-longest_prompt:] if options.prompt else ()
        begin = (self.sot_prev, *prompt, self.sot) if prompt else (self.sot,)
        if self.multilingual:
            if not options.language:
                return begin
            begin += (self.languages[options.language], getattr(self, options.task))
        return begin if options.timestamps else (*begin, self.no_timestamps)

    def validate(self, options: PromptOptions) -> None:
        """Raises OptionError for an unknown language or token, UnsupportedOption for a task."""
        known = self.languages if self.multilingual else {"en": 0}
        if options.language and options.language not in known:
            raise OptionError(f"language={options.language!r}", f"one of {' '.join(known)}", param="language")
        if options.task == "translate" and not self.multilingual:
            raise UnsupportedOption("task='translate'", "this model recognizes English only", param="task")
        wrong = [token for token in options.prompt if not (0 <= token < self.eot or token >= self.timestamp_begin)]
        if wrong:
            raise OptionError(f"prompt has token {wrong[0]}", "text and timestamps", param="prompt")
