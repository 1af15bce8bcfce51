"""Prompts of FunASR's speech LLMs: a chat whose user asks for a transcription and gives the audio.

Source: funasr 1.4.16, FunASRNano.get_prompt and data_load_speech; languages: the model cards of Fun-ASR-Nano-2512 and
Fun-ASR-MLT-Nano-2512.
"""

from __future__ import annotations

from asr_serve.errors import OptionError, WeightsCorrupt
from asr_serve.models.interfaces import PROMPT_EMBEDDING, PromptOptions
from asr_serve.text.tokenizers import HubTokenizer, Tokenizer

LANGUAGES = {
    "zh": "中文",
    "en": "英文",
    "ja": "日文",
    "yue": "粤语",
    "ko": "韩文",
    "vi": "越南语",
    "id": "印尼语",
    "th": "泰语",
    "ms": "马来语",
    "tl": "菲律宾语",
    "ar": "阿拉伯语",
    "hi": "印地语",
    "bg": "保加利亚语",
    "hr": "克罗地亚语",
    "cs": "捷克语",
    "da": "丹麦语",
    "nl": "荷兰语",
    "et": "爱沙尼亚语",
    "fi": "芬兰语",
    "el": "希腊语",
    "hu": "匈牙利语",
    "ga": "爱尔兰语",
    "lv": "拉脱维亚语",
    "lt": "立陶宛语",
    "mt": "马耳他语",
    "pl": "波兰语",
    "pt": "葡萄牙语",
    "ro": "罗马尼亚语",
    "sk": "斯洛伐克语",
    "sl": "斯洛文尼亚语",
    "sv": "瑞典语",
}
"""Language codes -> names in the prompt."""
SYSTEM = "You are a helpful assistant."
CONTEXT = "请结合上下文信息，更加准确地完成语音转写任务。如果没有相关信息，我们会留空。\n\n\n**上下文信息：**\n\n\n"
BEGIN, END = "<|im_start|>", "<|im_end|>"
"""Special tokens at the start and the end of what a participant says."""


def instruction(language: str, hotwords: tuple[str, ...], itn: bool) -> str:
    """Text that asks for the transcription. `language`: a code of LANGUAGES; empty: none. Raises OptionError.

    >>> instruction("en", (), itn=False)
    '语音转写成英文，不进行文本规整：'
    """
    if language and language not in LANGUAGES:
        raise OptionError(f"language={language!r}", f"one of: {', '.join(LANGUAGES)}", param="language")
    context = f"{CONTEXT}热词列表：[{', '.join(hotwords)}]\n" if hotwords else ""
    into = f"成{LANGUAGES[language]}" if language else ""
    return f"{context}语音转写{into}{'' if itn else '，不进行文本规整'}："


class ChatPrompt:
    """Prompts in the tokens of one language model."""

    def __init__(self, tokenizer: Tokenizer, *, system: bool, think: bool) -> None:
        """`system`: whether a system message comes first. `think`: False puts an empty thought before the answer, after
        which Qwen3 answers at once. Raises WeightsCorrupt for a tokenizer without the tokens of a chat."""
        if not isinstance(tokenizer, HubTokenizer):
            raise WeightsCorrupt("the vocabulary is no tokenizer.json", "that of the language model")
        self._encode = tokenizer.encode
        self.begin, self.end = (tokenizer.special_token(name) for name in (BEGIN, END))
        self._before = self._message(f"system\n{SYSTEM}") if system else ()
        thought = "" if think else "<think>\n\n</think>\n\n"
        newline = tuple(self._encode("\n"))
        self._after = (self.end, *newline, self.begin, *self._encode(f"assistant\n{thought}"))

    def _message(self, text: str) -> tuple[int, ...]:
        return (self.begin, *self._encode(text), self.end, *self._encode("\n"))

    def tokens(self, options: PromptOptions) -> tuple[int, ...]:
        """The prompt, with PROMPT_EMBEDDING where the audio stands. Special tokens that hotwords spell are left out.
        Raises OptionError."""
        asked = instruction(options.language, options.hotwords, options.itn)
        return (*self._before, self.begin, *self._encode(f"user\n{asked}"), PROMPT_EMBEDDING, *self._after)
