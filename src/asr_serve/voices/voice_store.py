"""Store of cloned voices, a folder: NAME.safetensors, and NAME.json, which is written last: without it there is no
voice.

Commands and servers may work on one folder at the same time: writers hold a lock on it. Readers do not, because
files are replaced as a whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import tempfile
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec

from asr_serve.errors import NoSuchVoice, OptionError, WeightsCorrupt
from asr_serve.types import suggest_name
from asr_serve.voices.cloned_voice import ClonedVoiceCard, check_voice_name

CARD, TENSORS = ".json", ".safetensors"
PART = ".part-"
MOST_BYTES = 64 << 20
"""Limit of a voice's file; they are about 1 MB."""
IN_ZIP = {"voice.json": 1 << 20, "voice.safetensors": MOST_BYTES}
"""Files of an exported voice, and their largest sizes. There is also CONSENT.txt, for people."""
VOICES = 4_096
"""Limit of voices in a folder."""


class VoiceStore:
    """Voices of one folder, which is created by the first write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """Returns the names, sorted."""
        names = (path.stem for path in self.folder.glob(f"*{CARD}") if path.with_suffix(TENSORS).is_file())
        return sorted(name for name in names if not name.startswith("."))

    def cards(self) -> list[ClonedVoiceCard]:
        """Returns the cards of all voices. Unreadable voices, and those deleted meanwhile, are left out."""
        cards = []
        for name in self.names():
            with contextlib.suppress(NoSuchVoice, WeightsCorrupt):
                cards.append(self.card(name))
        return cards

    def card(self, name: str) -> ClonedVoiceCard:
        """Returns a voice's card. Raises NoSuchVoice, WeightsCorrupt."""
        try:
            return msgspec.json.decode(self._file(name, CARD).read_bytes(), type=ClonedVoiceCard)
        except FileNotFoundError:
            self._unknown(name)
        except msgspec.DecodeError as failure:
            raise WeightsCorrupt(
                f"the card of the voice {name!r}: {failure}", "one that asr-serve wrote", "clone it again"
            ) from failure

    def path(self, name: str) -> Path:
        """Returns the path of a voice's tensors. Raises NoSuchVoice."""
        path = self._file(name, TENSORS)
        if not path.is_file() or not self._file(name, CARD).is_file():
            self._unknown(name)
        return path

    def add(self, card: ClonedVoiceCard, tensors: bytes, reserved: Collection[str] = ()) -> None:
        """Adds a voice. `reserved`: names of a model's own voices. Raises OptionError for a name that is taken or
        invalid; WeightsCorrupt where the tensors are not those of the card."""
        check_voice_name(card.name)
        digest = hashlib.sha256(tensors).hexdigest()
        if digest != card.sha256:
            raise WeightsCorrupt(f"the tensors of {card.name!r} have sha256 {digest}", f"its card says {card.sha256}")
        with self._locked():
            self.check_name_free(card.name, reserved)
            if len(self.names()) >= VOICES:
                raise OptionError(f"{self.folder} holds {VOICES} voices", "that many at most", "delete some")
            self._write_atomically(self._file(card.name, TENSORS), tensors)
            self._write_atomically(
                self._file(card.name, CARD), msgspec.json.format(msgspec.json.encode(card), indent=1)
            )

    def check_name_free(self, name: str, reserved: Collection[str] = ()) -> None:
        """Raises OptionError where the name is invalid or taken."""
        check_voice_name(name)
        if name in reserved:
            raise OptionError(f"{name!r} is a voice of the model's own", "a name of its own", param="name")
        if self._file(name, CARD).exists():
            raise OptionError(
                f"there is a voice {name!r} already", "a new name", "delete or rename that one first", param="name"
            )

    def rename(self, name: str, new: str, reserved: Collection[str] = ()) -> ClonedVoiceCard:
        """Renames a voice. Sentences in progress with the old name finish. Raises NoSuchVoice, OptionError."""
        with self._locked():
            card = self.card(name)
            if new == name:
                return card
            self.check_name_free(new, reserved)
            renamed = msgspec.structs.replace(card, name=new)
            self._file(new, TENSORS).unlink(missing_ok=True)  # left by an interrupted write
            os.link(self.path(name), self._file(new, TENSORS))
            self._write_atomically(self._file(new, CARD), msgspec.json.format(msgspec.json.encode(renamed), indent=1))
            self._remove(name)
            return renamed

    def delete(self, name: str) -> ClonedVoiceCard:
        """Deletes a voice for good. Raises NoSuchVoice."""
        with self._locked():
            card = self.card(name)
            self._remove(name)
            return card

    def export_voice(self, name: str) -> bytes:
        """Returns a zip of a voice with its card and consent. Raises NoSuchVoice, WeightsCorrupt."""
        card, tensors = self.card(name), self.path(name).read_bytes()
        consent = card.consent
        consent_text = (
            f"{consent.statement}\n\nHanded in by {consent.by}, at {consent.at} (Unix seconds), for the voice "
        )
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as parts:
            for inside, data in (
                ("voice.json", msgspec.json.encode(card)),
                ("voice.safetensors", tensors),
                ("CONSENT.txt", f"{consent_text}{name!r}.\n".encode()),
            ):
                parts.writestr(zipfile.ZipInfo(inside, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
        return archive.getvalue()

    def import_voice(
        self, source: BinaryIO, name: str | None = None, reserved: Collection[str] = ()
    ) -> ClonedVoiceCard:
        """Adds a voice that `export_voice` wrote, by its own name or another. Raises OptionError for any other
        file, WeightsCorrupt where it is damaged."""
        expected = "a zip that `asr-serve voices export` wrote"
        content = {}
        try:
            with zipfile.ZipFile(source) as parts:
                for inside, longest in IN_ZIP.items():
                    with parts.open(inside) as part:
                        content[inside] = part.read(longest + 1)
                    if len(content[inside]) > longest:
                        raise OptionError(f"{inside} is longer than {longest} bytes", expected)
            card = msgspec.json.decode(content["voice.json"], type=ClonedVoiceCard)
        except (
            zipfile.BadZipFile,
            KeyError,
            msgspec.DecodeError,
            EOFError,
            NotImplementedError,
            RuntimeError,
        ) as failure:
            raise OptionError(f"that is no voice: {failure}", expected) from failure
        card = msgspec.structs.replace(card, name=card.name if name is None else name)
        self.add(card, content["voice.safetensors"], reserved)
        return card

    def _file(self, name: str, suffix: str) -> Path:
        """Returns the path of a voice's file; no name leads outside the folder. Raises NoSuchVoice."""
        try:
            return self.folder / f"{check_voice_name(name)}{suffix}"
        except OptionError:
            self._unknown(name)

    def _unknown(self, name: str) -> NoReturn:
        names = self.names()
        raise NoSuchVoice(
            f"there is no cloned voice {name[:80]!r}",
            f"cloned voices: {', '.join(names[:50]) or 'none'}",
            suggest_name(name, names),
            param="voice",
        )

    def _remove(self, name: str) -> None:
        self._file(name, CARD).unlink()
        self._file(name, TENSORS).unlink(missing_ok=True)

    def _write_atomically(self, path: Path, data: bytes) -> None:
        """Writes a file completely, or not at all."""
        handle, part = tempfile.mkstemp(prefix=PART, dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(part, 0o644)
            os.replace(part, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks the folder for changes, and removes partial files of killed processes. Raises OptionError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as failure:
            raise OptionError(
                f"voices_dir={str(self.folder)!r}: {failure.strerror}", "a folder that may be written to"
            ) from failure
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            for part in self.folder.glob(f"{PART}*"):
                part.unlink(missing_ok=True)
            yield
        finally:
            os.close(handle)
