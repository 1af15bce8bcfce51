"""Sources of a server's settings: defaults, then a file, the environment, flags. A later source replaces an
earlier one; lists and tables are replaced whole.

Nothing is guessed: an unknown name, a wrong type or a number out of range is an OptionError that names the source.
"""

from __future__ import annotations

import ast
import contextlib
import inspect as sources
import itertools
import json
import re
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from asr_serve import config
from asr_serve.config import (
    NON_SETTING_VARIABLES,
    PREFIX,
    BatchConfig,
    EngineConfig,
    GovernanceConfig,
    ServeConfig,
    SessionsConfig,
    WebRtcConfig,
)
from asr_serve.errors import OptionError, SourceNotFound
from asr_serve.types import SECRETS, ApiKey, PeerKey, describe_allowed, suggest_name, without_secrets

SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
"""Suffixes after the prefix of variables that Kubernetes sets in pods beside a service called asr-serve."""


SettingsTable = EngineConfig | SessionsConfig | WebRtcConfig | GovernanceConfig | BatchConfig
TABLES: dict[str, type[SettingsTable]] = {
    "engine": EngineConfig,
    "sessions": SessionsConfig,
    "webrtc": WebRtcConfig,
    "governance": GovernanceConfig,
    "batch": BatchConfig,
}
"""Settings of ServeConfig that are tables of settings."""


class Setting(NamedTuple):
    """One setting: `port`, or `engine.max_decode_rows`."""

    name: str
    kind: inspect.Type
    default: object
    help: str

    @property
    def allowed(self) -> str:
        """Allowed values, in words."""
        return describe_allowed(self.kind)

    @property
    def variable(self) -> str:
        """Environment variable: `ASR_SERVE_PORT`, `ASR_SERVE_ENGINE__MAX_DECODE_ROWS`."""
        return PREFIX + self.name.replace(".", "__").upper()


class SettingValue(NamedTuple):
    """A value that was set, and its source: `env ASR_SERVE_PORT`."""

    value: object
    source: str


@cache
def all_settings() -> dict[str, Setting]:
    """Every setting by name, in the order of config.py; those in tables last."""
    helps = setting_docstrings()
    found = {}
    structs = {"": ServeConfig, **{f"{table}.": struct for table, struct in TABLES.items()}}
    for prefix, struct in structs.items():
        for field in msgspec.structs.fields(struct):
            if field.type in TABLES.values():
                continue
            factory = field.default is msgspec.NODEFAULT
            default = field.default_factory() if factory else field.default
            help = helps.get((struct.__name__, field.name), "")
            name = prefix + field.name
            found[name] = Setting(name, inspect.type_info(field.type), default, help)
    return found


def setting_docstrings() -> dict[tuple[str, str], str]:
    """Docstrings of the fields in config.py: (class, field) -> the string below the field, on one line."""
    try:
        tree = ast.parse(sources.getsource(config))
    except OSError:  # built without sources: no help, and all else works
        return {}
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        for pair in itertools.pairwise(node.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[node.name, field] = " ".join(text.split())
    return found


def load_serve_config(
    file: str | None, environ: Mapping[str, str], flags: Mapping[str, object] | None = None
) -> ServeConfig:
    """Read a server's settings from a TOML file (else the one ASR_SERVE_CONFIG names), the environment, and `flags`:
    setting -> value, or its text. Key files are read here. Raises OptionError."""
    return build_config(
        collect_values(file, environ, {name: SettingValue(value, "flag") for name, value in (flags or {}).items()})
    )


def collect_values(
    file: str | None, environ: Mapping[str, str], flags: Mapping[str, SettingValue]
) -> dict[str, SettingValue]:
    """Values that were set, by setting; the last source wins. Raises OptionError for a name that is no setting."""
    file = file or environ.get(f"{PREFIX}CONFIG")
    values = values_from_file(file) if file else {}
    for name, (value, source) in [*values_from_environ(environ).items(), *flags.items()]:
        if name not in all_settings():
            raise unknown_setting_error(name, source)
        values[name] = SettingValue(
            parse_value(all_settings()[name], value, source) if isinstance(value, str) else value, source
        )
    return values


def build_config(given: Mapping[str, SettingValue]) -> ServeConfig:
    """Build the ServeConfig of collected values; keys from key files are added to their settings."""
    values: dict[str, Any] = {name: value for name, (value, _) in given.items() if "." not in name}
    for table, struct in TABLES.items():
        prefix = f"{table}."
        with with_source(given, prefix):
            fields: dict[str, Any] = {
                name.removeprefix(prefix): value for name, (value, _) in given.items() if name.startswith(prefix)
            }
            values[table] = struct(**fields)
    with with_source(given, ""):
        made = ServeConfig(**values)
        for name in SECRETS:
            if file := getattr(made, f"{name}_file"):
                keys = dict.fromkeys((*getattr(made, name), *read_keys(file, f"{name}_file")))
                made = msgspec.structs.replace(made, **{name: tuple(keys)})
    return made


@contextlib.contextmanager
def with_source(given: Mapping[str, SettingValue], prefix: str) -> Iterator[None]:
    """Add the source of the value to an error about a field."""
    try:
        yield
    except OptionError as error:
        name = f"{prefix}{error.param}"
        source = f" ({given[name].source})" if name in given else ""
        raise OptionError(f"{prefix}{error.came}{source}", error.allowed, error.todo, param=name) from None


def unknown_setting_error(name: str, source: str, excluded: Collection[str] = ()) -> OptionError:
    """The error for a name that is no setting, with the nearest one in any table, but for `excluded` ones."""
    names = {setting.rpartition(".")[2]: setting for setting in all_settings() if setting not in excluded}
    return OptionError(
        f"unknown setting {name!r} ({source})",
        "asr-serve serve --print-config lists them all",
        suggest_name(name.rpartition(".")[2], names),
    )


# --- sources ----------------------------------------------------------------------------------------------


def values_from_file(file: str) -> dict[str, SettingValue]:
    """The settings in a TOML file. Raises OptionError; SourceNotFound."""
    try:
        text = Path(file).expanduser().read_text("utf-8")
        tables = tomllib.loads(text)
    except OSError as error:
        raise SourceNotFound(
            f"the config file {file} cannot be read: {error.strerror}", todo="check the path"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"config file {file}: {error}", "a TOML file") from None
    settings = list[tuple[str, object]]()
    for table in TABLES:
        found = tables.pop(table, {})
        if not isinstance(found, dict):
            raise OptionError(f"{table}={found!r} (file {file}{toml_line(table, text)})", f"a table, [{table}]")
        settings += [(f"{table}.{name}", value) for name, value in found.items()]
    values = {}
    for name, value in [*tables.items(), *settings]:
        source = f"file {file}{toml_line(name, text)}"
        if name not in all_settings():
            raise unknown_setting_error(name, source)
        values[name] = SettingValue(value, source)
    return values


def toml_line(name: str, text: str) -> str:
    """Line of a setting or its table in TOML, as `:12`; empty where it is written in an unusual way."""
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([\w.]+)\]", line):
            section = header[1] + "."
        entry = re.match(r"""\s*["']?([\w.-]+)["']?\s*=""", line)
        if section == name + "." or (entry and section + entry[1] == name):
            return f":{number}"
    return ""


def values_from_environ(environ: Mapping[str, str]) -> dict[str, SettingValue]:
    """The settings in the environment. Skips our variables that are no setting, and those of Kubernetes, which sets
    ASR_SERVE_PORT=tcp://10.0.0.1:8000 and the like. Raises OptionError for any other variable with the prefix."""
    names = {setting.variable: name for name, setting in all_settings().items()}
    others = [PREFIX + name for name in NON_SETTING_VARIABLES]
    values = {}
    for variable, text in sorted(environ.items()):
        rest = variable.removeprefix(PREFIX)
        link = SERVICE_LINK.fullmatch(rest) or (rest.endswith("PORT") and "://" in text)
        if rest == variable or variable in others or link:
            continue
        if variable not in names:
            raise OptionError(
                f"unknown setting {variable} (environment)",
                "asr-serve serve --print-config lists them all",
                suggest_name(variable, [*names, *others]),
            )
        values[names[variable]] = SettingValue(text, f"env {variable}")
    return values


def parse_value(setting: Setting, text: str, source: str) -> object:
    """The value that a text stands for; the text itself where it does not parse, for the struct to refuse."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise OptionError(f"{setting.name} is not UTF-8 ({source})", setting.allowed) from None
    kind = setting.kind
    if isinstance(kind, inspect.UnionType):
        if text.lower() == "none":
            return None
        kind = next(member for member in kind.types if not isinstance(member, inspect.NoneType))
    kind = kind.type if isinstance(kind, inspect.Metadata) else kind
    match kind:
        case inspect.VarTupleType():
            parts = tuple(part.strip() for part in text.split(",") if part.strip())
            if setting.name in SECRETS and not parts:  # a variable that was meant to hold a key is empty
                raise OptionError(f"{setting.name} is empty ({source})", "a key", "unset it to ask for none")
            return parts
        case inspect.DictType():
            pairs = [part.partition("=") for part in text.split(",") if part.strip()]
            return {k.strip(): v.strip() for k, _, v in pairs} if all(eq for _, eq, _ in pairs) else text
        case inspect.IntType() | inspect.FloatType() | inspect.BoolType():
            plain = {inspect.IntType: int, inspect.FloatType: float, inspect.BoolType: bool}[type(kind)]
            try:
                return msgspec.convert(text.replace("_", ""), plain, strict=False)
            except msgspec.ValidationError:
                return text
        case _:
            return text


def read_keys(file: str, name: str) -> list[str]:
    """The keys in a file, one per line; # starts a comment. Raises OptionError for none: that would open the server."""
    try:
        lines = Path(file).expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise OptionError(f"{name}={file!r}: {why}", "a file with a key on each line", param=name) from None
    keys, kind = [], PeerKey if name == "peer_keys_file" else ApiKey
    for number, line in enumerate(lines, 1):
        key = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip()
        if not key:
            continue
        try:
            keys.append(msgspec.convert(key, kind))
        except msgspec.ValidationError:
            fitting = describe_allowed(inspect.type_info(kind))
            raise OptionError(f"{name}={file!r}: line {number} is no key", fitting, param=name) from None
    if not keys:
        raise OptionError(f"{name}={file!r} holds no key", "a key on each line", param=name)
    return keys


# --- printed ----------------------------------------------------------------------------------------------


def config_to_toml(made: ServeConfig, given: Mapping[str, SettingValue]) -> str:
    """All settings in force, as a TOML file that configures the same server again, except for its keys."""
    lines = [
        "# Every setting of this server, and where it comes from.",
        "# As a --config file it makes the same server, but for the keys: they are not printed.",
    ]
    for name, setting in all_settings().items():
        section, _, field = name.rpartition(".")
        if section and f"[{section}]" not in lines:
            lines += ["", f"[{section}]"]
        value = getattr(getattr(made, section) if section else made, field)
        source = given[name].source if name in given else "default"
        source = source if source.isprintable() else ascii(source)
        lines += ["", *textwrap.wrap(setting.help, 100, initial_indent="# ", subsequent_indent="# ")]
        if name in SECRETS and value:
            file = f", {name}_file" if getattr(made, f"{name}_file") else ""
            lines.append(f'# {field} = "***"  # {len(value)} in all: {source}{file}')
        elif value is None:
            lines.append(f"# {field} is not set  # {source}")
        else:
            if name == "sessions.redis_url":
                value = without_secrets(str(value))
            lines.append(f"{field} = {toml_value(value)}  # {source}")
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    """A value in TOML syntax."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() if value >= 100_000:
            return f"{value:_}"
        case tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case dict():
            pairs = ", ".join(f"{toml_value(name)} = {toml_value(of)}" for name, of in value.items())
            return f"{{ {pairs} }}" if pairs else "{}"
        case _:
            return str(value)
