"""Checks of the names in a configuration, before the server listens.

They run in a process of their own: cards of models, and devices, are known where torch is loaded, which the server does
not load.

    python -m asr_serve.engine.process.startup_checks < names.json
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from asr_serve.config import AUTO_MODEL, EngineConfig, ServeConfig, engine_environment
from asr_serve.engine.process.messages import ErrorMessage
from asr_serve.errors import AsrServeError, OptionError
from asr_serve.text.languages import MULTILINGUAL_COMMAND
from asr_serve.types import suggest_name

CHECK_TIMEOUT_S = 60.0
"""Time for the checks; a machine that takes longer learns of a wrong name when the engine loads."""

log = logging.getLogger(__name__)


class StartupNames(msgspec.Struct, frozen=True):
    """Names to check, by setting."""

    model: str
    more_models: tuple[str, ...]
    aliases: dict[str, str]
    voice: str
    turn_model: str
    device: str
    weights: str | None
    """Folder of the model's weights; None: its own."""
    pipeline: str | None
    """Name of the pipeline, which aliases may stand for; None: none."""
    stage_devices: tuple[tuple[str, str], ...]
    """Devices that its stages name, each with its place in the file."""
    routes: tuple[str, ...] = ()
    """Routes of the policy, which aliases may stand for."""
    routed_models: tuple[str, ...] = ()
    """Models of those routes."""
    auto_model: str = AUTO_MODEL
    split: tuple[str, ...] = ()
    """Models whose encoder and decoder run in different engines."""

    @classmethod
    def of(cls, config: ServeConfig, pipeline: str | None, stage_devices: tuple[tuple[str, str], ...]) -> StartupNames:
        return cls(
            config.model,
            config.more_models,
            config.aliases,
            config.voice,
            config.turn_model,
            config.device,
            config.weights,
            pipeline,
            stage_devices,
            auto_model=config.auto_model,
        )

    @property
    def known_to_be_valid(self) -> bool:
        """Returns whether all names are defaults, or stand for nothing that may be missing."""
        default = ServeConfig()
        models = {self.model, *self.more_models, *self.aliases.values(), *self.routed_models}
        return (
            models == {default.model}
            and self.voice in ("auto", "none")
            and self.turn_model in ("auto", "none")
            and self.device in ("auto", "cpu")
            and self.weights is None
            and self.auto_model in (AUTO_MODEL, "none")
            and not self.stage_devices
        )


def check_split(models: tuple[str, ...]) -> None:
    """Checks that the encoder and the decoder of these models may run in different engines. Those of hub repositories
    and folders are known once they are loaded. Raises OptionError."""
    default = ServeConfig()
    _run_checks(msgspec.structs.replace(StartupNames.of(default, None, ()), split=models))


def check_startup(
    config: ServeConfig,
    pipeline: str | None,
    stage_devices: tuple[tuple[str, str], ...] = (),
    routes: tuple[str, ...] = (),
    routed_models: tuple[str, ...] = (),
) -> None:
    """Checks a server's configuration. The other arguments: see StartupNames. Raises OptionError for an unknown model,
    alias, voice or turn model, and for a device that this machine lacks; NoCheckpoint for a folder that holds no
    model."""
    names = StartupNames.of(config, pipeline, stage_devices)
    names = msgspec.structs.replace(names, routes=routes, routed_models=routed_models)
    if not names.known_to_be_valid:
        _run_checks(names)


def _run_checks(names: StartupNames) -> None:
    """Runs `check_names` in a process of its own. Raises OptionError, NoCheckpoint."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "asr_serve.engine.process.startup_checks"],
            input=msgspec.json.encode(names),
            stdout=subprocess.PIPE,
            env=engine_environment(None),
            timeout=CHECK_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as failure:
        log.warning("the names of models and devices were not checked before the start: %s", failure)
        return
    if done.stdout:
        raise msgspec.json.decode(done.stdout, type=ErrorMessage).to_error()


def check_names(names: StartupNames) -> None:
    """Checks names where torch may be loaded. Raises OptionError, NoCheckpoint."""
    from asr_serve.devices import check_device
    from asr_serve.engine.remote.roles import validate_roles
    from asr_serve.models.checkpoints import store
    from asr_serve.models.registry import asr_cards, engine_card, hub_repository, names_folder, tts_cards, turn_cards

    recognizers, voices = asr_cards(), tts_cards()
    models = [*recognizers, *voices]
    chosen = [("model", names.model), *(("more_models", name) for name in names.more_models)]
    chosen += [("governance.policy", name) for name in names.routed_models]
    # What a repository holds is known once it is downloaded.
    places = [name for _, name in chosen if hub_repository(name) is not None or names_folder(name)]
    for name in places:
        if hub_repository(name) is None:
            store.model_of_folder(Path(name).expanduser())
    targets = [*([names.pipeline] if names.pipeline else []), *names.routes, *models, *places]
    for setting, name in chosen:
        if name not in places and (setting, name) != ("model", AUTO_MODEL):
            _check_name(setting, name, models, "model")
    if names.model == AUTO_MODEL and store.multilingual_model() is None:
        raise OptionError(
            f"model={AUTO_MODEL}, and no multilingual Whisper is on this machine",
            "a multilingual Whisper, or another model",
            MULTILINGUAL_COMMAND,
            param="model",
        )
    if names.auto_model not in (AUTO_MODEL, "none") and names.auto_model not in places:
        _check_name("auto_model", names.auto_model, models, "model")
    if names.weights is not None and names.model in recognizers:
        store.find(recognizers[names.model], names.weights)
    for alias, name in names.aliases.items():
        _check_name("aliases", name, targets, f"model for the alias {alias!r}:")
    if names.voice in recognizers:
        raise OptionError(
            f"voice={names.voice}, which recognizes speech and does not synthesize it",
            f"one of: auto, none, {', '.join(voices)}",
            param="voice",
        )
    _check_name("voice", names.voice, ["auto", "none", *voices], "speech synthesis model")
    _check_name("turn_model", names.turn_model, ["auto", "none", *turn_cards()], "turn model")
    for name in names.split:
        if hub_repository(name) is None and not names_folder(name):
            _check_name("models", name, models, "model")
            validate_roles(engine_card(name), EngineConfig(role="decode"))
    check_device(names.device)
    for device, place in names.stage_devices:
        try:
            check_device(device)
        except OptionError as failure:
            raise failure.located(place) from failure


def _check_name(setting: str, name: str, known: Iterable[str], what: str) -> None:
    known = list(known)
    if name not in known:
        raise OptionError(
            f"there is no {what} {name!r}",
            f"one of: {', '.join(known)}",
            suggest_name(name, known) or "list them with: asr-serve models list",
            param=setting,
        )


def main() -> None:
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the output of a library is no message
    try:
        check_names(msgspec.json.decode(sys.stdin.buffer.read(), type=StartupNames))
    except AsrServeError as failure:
        out.write(msgspec.json.encode(ErrorMessage.from_error(failure)))
    out.close()


if __name__ == "__main__":
    main()
