"""The whole of what was heard, in a file, once it is over: who speaks is corrected by then."""

from __future__ import annotations

from pathlib import Path

from asr_serve.audio.manifest import Item
from asr_serve.cli.results.names import spare_inputs
from asr_serve.cli.results.outputs import choose_format, is_folder, make_folder, write_whole
from asr_serve.errors import OptionError
from asr_serve.streaming.results import StreamResult
from asr_serve.text.formats.rendering import WANT_SPEAKERS, WANT_WORDS, render
from asr_serve.types import Transcript
from asr_serve.units import ms_to_samples


class Kept:
    """--output of `listen`."""

    def __init__(self, output: str, form: str | None, source: str | None) -> None:
        """`source`: the file that is heard, `-`, or None for the microphone. Raises OptionError, before anybody
        speaks, for what could not be written."""
        if is_folder(output):
            raise OptionError(f"--output {output}", "one file", "name it: note.txt")
        self.path, self.form = Path(output), choose_format(form, output)
        self._key = {"-": "stdin", None: "microphone"}.get(source, source or "")
        if source not in ("-", None):
            spare_inputs([self.path], [Item(self._key, self._key)], [])
        make_folder(self.path.parent)

    @property
    def wants(self) -> dict[str, bool]:
        """Options without which there would be little in it."""
        wanted = {"words": self.form in WANT_WORDS, "speakers": self.form in WANT_SPEAKERS}
        return {name: True for name, needed in wanted.items() if needed}

    def write(self, last: StreamResult, language: str, model: str) -> None:
        """`last`: the final result. Raises OSError."""
        samples = ms_to_samples(last.audio_duration_ms)
        whole = Transcript(self._key, last.text, language, samples, last.segments, model)
        write_whole(self.path, render(whole, self.form).encode("utf-8", "replace"))
