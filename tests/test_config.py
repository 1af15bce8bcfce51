"""Settings from every source, the errors they make, and what is printed of them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asr_serve
from asr_serve.config import NON_SETTING_VARIABLES, PREFIX, EngineConfig, ServeConfig
from asr_serve.config_sources import (
    SettingValue,
    all_settings,
    build_config,
    collect_values,
    config_to_toml,
    load_serve_config,
    toml_value,
)
from asr_serve.errors import OptionError, SourceNotFound

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
MARKED = re.compile(r"(?<=<!-- settings -->\n).*?(?=<!-- /settings -->)", re.DOTALL)


def table() -> str:
    """Every setting as the page shows it."""
    rows = ["| setting | default | takes | |", "|---|---|---|---|"]
    for setting in all_settings().values():
        default = "" if setting.default is None else f"`{toml_value(setting.default)}`"
        rows.append(f"| `{setting.name}` | {default} | {setting.allowed} | {setting.help} |")
    return "\n".join(rows) + "\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "asr-serve.toml"


def expect_error(parts: list[str], *sources: Any) -> str:
    """Load settings that are invalid; the error has all of these parts."""
    with pytest.raises(OptionError) as error:
        load_serve_config(*sources)
    message = str(error.value)
    assert [part for part in parts if part not in message] == [], message
    return message


# --- which source wins -----------------------------------------------------------------------------------------


def test_defaults_are_used_where_nothing_is_set() -> None:
    assert load_serve_config(None, {}) == ServeConfig()
    assert ServeConfig().model == asr_serve.DEFAULT_MODEL


def test_a_later_source_replaces_an_earlier_one(file: Path) -> None:
    file.write_text(
        'host = "h.file"\nport = 1\nlog_level = "debug"\nmore_models = ["a", "b"]\nmax_models = 9\n'
        'aliases = { x = "file", y = "file" }\n[engine]\nmax_requests = 1\nvad_windows = 100\n'
    )
    environ = {
        "ASR_SERVE_CONFIG": str(file),
        "ASR_SERVE_HOST": "h.env",
        "ASR_SERVE_PORT": "2",
        "ASR_SERVE_MORE_MODELS": "c",
        "ASR_SERVE_ALIASES": "x=env",
        "ASR_SERVE_ENGINE__MAX_REQUESTS": "2",
    }
    made = load_serve_config(None, environ, {"host": "h.flag", "engine.encode_frames": "3"})
    assert (made.host, made.port, made.log_level) == ("h.flag", 2, "debug")
    assert (made.more_models, made.aliases) == (("c",), {"x": "env"})
    assert made.engine == EngineConfig(max_requests=2, vad_windows=100, encode_frames=3)


def test_a_named_file_comes_before_the_one_in_the_environment(file: Path) -> None:
    file.write_text("port = 5")
    assert load_serve_config(str(file), {"ASR_SERVE_CONFIG": "no-such-file.toml"}).port == 5


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("port", "0", 0),
        ("max_body_bytes", "1_000_000", 1_000_000),
        ("drain_s", "1.5", 1.5),
        ("docs", "FALSE", False),
        ("metrics", "1", True),
        ("weights", "none", None),
        ("weights", "a folder, with=signs", "a folder, with=signs"),
        ("concurrent_per_key", "None", None),
        ("concurrent_per_key", "7", 7),
        ("more_models", "", ()),
        ("more_models", " a , b,", ("a", "b")),
        ("aliases", "", {}),
        ("aliases", "whisper-1 = a, org/whisper=b", {"whisper-1": "a", "org/whisper": "b"}),
        ("cors_origins", "https://a.org,http://b:80,*", ("https://a.org", "http://b:80", "*")),
        ("host", "::1", "::1"),
        ("ring_slots", "64", 64),
    ],
)
def test_text_becomes_a_value(name: str, text: str, value: object) -> None:
    more = {"ASR_SERVE_MAX_MODELS": "9"}
    for made in (
        load_serve_config(None, more, {name: text}),
        load_serve_config(None, more | {all_settings()[name].variable: text}),
    ):
        assert getattr(made, name) == value
        assert type(getattr(made, name)) is type(value)


def test_variables_that_are_no_settings_are_ignored() -> None:
    kubernetes = {
        "ASR_SERVE_SERVICE_HOST": "10.0.0.1",
        "ASR_SERVE_SERVICE_PORT": "8000",
        "ASR_SERVE_SERVICE_PORT_HTTP": "8000",
        "ASR_SERVE_PORT": "tcp://10.0.0.1:8000",
        "ASR_SERVE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "ASR_SERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "ASR_SERVE_METRICS_PORT": "tcp://10.0.0.2:9090",
        "ASR_SERVE_METRICS_SERVICE_HOST": "10.0.0.2",
    }
    ours = {f"ASR_SERVE_{name}": "x" for name in NON_SETTING_VARIABLES if name != "CONFIG"}
    assert load_serve_config(None, kubernetes | ours | {"PATH": "/bin", "ASR": "x"}) == ServeConfig()


def test_every_variable_that_the_project_reads_is_known() -> None:
    """A server must not refuse to start for a variable that some other part of us takes."""
    read = re.compile(r"""(?:environ(?:\.get)?[\[(]|getenv\(|setenv\()\s*["']ASR_SERVE_(\w+)["']""")
    paths = [path for folder in ("src", "tests", "bench", "examples") for path in (ROOT / folder).rglob("*.py")]
    named = {name for path in paths for name in read.findall(path.read_text())}
    settings = {setting.variable.removeprefix(PREFIX) for setting in all_settings().values()}
    assert {"CACHE", "NATIVE", "THREADS"} <= named
    assert named <= settings | set(NON_SETTING_VARIABLES)


# --- invalid settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prot = 1", ["'prot'", "asr-serve.toml:1)", "'port'"]),
        ("port = 1\n\n[engine]\nmax_decode_row = 3", ["'engine.max_decode_row'", ":4)", "'engine.max_decode_rows'"]),
        ("max_decode_rows = 3", ["'max_decode_rows'", ":1)", "'engine.max_decode_rows'"]),
        ("[engine]\nport = 1", ["'engine.port'", ":2)", "'port'"]),
        ("[server]\nport = 1", ["'server'", ":1)"]),
        ("engine = 3", ["engine=3", ":1)", "a table"]),
        ("engine.kv_bytes = 0", ["engine.kv_bytes=0 (", ":1)", "1 or more"]),
        ("engine = { kv_bytes = 0 }", ["engine.kv_bytes=0 (", "asr-serve.toml)"]),
        ('port = "8000"', ["port='8000' (", ":1)", "a whole number, 0 to 65535"]),
        ("port = 8000.0", ["port=8000.0"]),
        ("port = true", ["port=True"]),
        ("port = 65536", ["port=65536", "0 to 65535"]),
        ("# port = 1\nhost = 1", ["host=1 (", ":2)"]),
        ("docs = 1", ["docs=1", "true or false"]),
        ('more_models = "a"', ["more_models='a'", "a list"]),
        ('more_models = ["a", 1]', ["more_models=['a', 1]", "a list"]),
        ("aliases = { a = 1 }", ["aliases={'a': 1}", "name=model"]),
        ('[aliases]\n"a b" = "c"', ["aliases={'a b': 'c'} (", ":1)"]),
        ('aliases = { a = "b", b = "c" }', ["a is for b", "a=c"]),
        ('log_format = "jsno"', ["log_format='jsno'", "json, text", "did you mean 'json'"]),
        ("drain_s = -1", ["drain_s=-1", "0 to 86400"]),
        ("max_duration_s = nan", ["max_duration_s=nan", "more than 0"]),
        ("upload_idle_s = inf", ["upload_idle_s=inf", "more than 0, up to 86400"]),
        ("ring_slots = 1000", ["ring_slots=1000 (", "a power of two"]),
        ("ring_payload_bytes = 100", ["ring_payload_bytes=100", "of whole 64s"]),
        ('host = "0.0.0.0:80"', ["without port"]),
        ('host = "http://here"', ["without port or scheme"]),
        ('cors_origins = ["example.org"]', ["an origin like"]),
        ('otel_endpoint = "collector:4317"', ["otel_endpoint='collector:4317'", "http://"]),
        ('weights = ""', ["weights=''"]),
        ('more_models = ["b", "c"]', ["max_models=2 and 3 models", "moonshine-tiny-en", "max_models=3"]),
        ("concurrent_per_key = 0", ["concurrent_per_key=0", "1 or more; or none"]),
        ("[engine]\nencode_padding = 1.0", ["engine.encode_padding=1.0", ":2)", "more than 0, less than 1"]),
        ("[engine]\nvad_windows = 63", ["64 or more"]),
        (
            "[engine]\nhost_bytes = 0\ndisk_bytes = 8_000_000",
            ["engine.disk_bytes=8000000 with host_bytes=0 (", ":3)", "host_bytes=1048576 or more"],
        ),
        ("[engine]\nhost_bytes = 1_048_575\ndisk_bytes = 1", ["with host_bytes=1048575 ("]),
        ("[engine]\nrole = 'encode'\ndisk_bytes = 1", ["engine.disk_bytes=1 with role=encode (", ":3)"]),
        ("[engine]\ndisk_path = '/tmp'", ["engine.disk_path='/tmp' without disk_bytes", ":2)", "set disk_bytes"]),
        ("[engine]\ndisk_key_file = 'k'", ["engine.disk_key_file='k' without disk_bytes"]),
        ("[engine]\ndisk_backend = 'uring'", ["engine.disk_backend='uring' without disk_bytes"]),
        ("port = \n", ["asr-serve.toml: ", "line 1"]),
    ],
)
def test_the_error_of_a_file_has_the_setting_its_line_and_what_is_allowed(
    file: Path, text: str, parts: list[str]
) -> None:
    file.write_text(text)
    expect_error(parts, str(file), {})


def test_files_that_cannot_be_read(file: Path) -> None:
    with pytest.raises(SourceNotFound, match=r"asr-serve\.toml cannot be read: No such file"):
        load_serve_config(str(file), {})
    file.write_bytes(b'host = "\xff"')
    with pytest.raises(OptionError, match=r"asr-serve\.toml: .*utf-8"):
        load_serve_config(str(file), {})


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"ASR_SERVE_PROT": "1"}, ["ASR_SERVE_PROT (environment)", "'ASR_SERVE_PORT'"]),
        ({"ASR_SERVE_ENGINE_KV_BYTES": "1"}, ["'ASR_SERVE_ENGINE__KV_BYTES'"]),
        ({"ASR_SERVE_NATIV": "1"}, ["'ASR_SERVE_NATIVE'"]),
        ({"ASR_SERVE_port": "1"}, ["ASR_SERVE_port"]),
        ({"ASR_SERVE_PORT": "eighty"}, ["port='eighty' (env ASR_SERVE_PORT)", "a whole number"]),
        ({"ASR_SERVE_PORT": ""}, ["port='' (env ASR_SERVE_PORT)"]),
        ({"ASR_SERVE_PORT": "none"}, ["port='none'"]),
        ({"ASR_SERVE_DOCS": "yes"}, ["docs='yes' (env ASR_SERVE_DOCS)", "true or false"]),
        ({"ASR_SERVE_ALIASES": "a=b,c"}, ["aliases='a=b,c' (env ASR_SERVE_ALIASES)", "name=model"]),
        ({"ASR_SERVE_ENGINE__KV_BYTES": "-1"}, ["engine.kv_bytes=-1 (env ASR_SERVE_ENGINE__KV_BYTES)"]),
        ({"ASR_SERVE_WEIGHTS": "\udcff"}, ["weights is not UTF-8 (env ASR_SERVE_WEIGHTS)"]),
    ],
)
def test_the_error_of_a_variable_names_it_and_the_nearest(environ: Mapping[str, str], parts: list[str]) -> None:
    expect_error(parts, None, environ)


def test_the_error_names_the_source_that_won(file: Path) -> None:
    file.write_text("port = -1")
    assert load_serve_config(str(file), {"ASR_SERVE_PORT": "1"}).port == 1
    with pytest.raises(OptionError, match=r"port=-2 \(flag\)"):
        load_serve_config(str(file), {"ASR_SERVE_PORT": "1"}, {"port": -2})


@pytest.mark.parametrize(
    ("wrong", "param"),
    [({"port": 70_000}, "port"), ({"port": "80"}, "port"), ({"host": ""}, "host"), ({"engine": {"x": 1}}, "engine")],
)
def test_a_config_made_directly_is_checked_by_the_same_rules(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(OptionError) as error:
        ServeConfig(**wrong)
    assert error.value.param == param


def test_valid_disk_settings() -> None:
    whole = {"disk_bytes": 1, "disk_path": "/tmp", "disk_key_file": "k", "disk_backend": "threads"}
    made = load_serve_config(None, {}, {f"engine.{name}": value for name, value in whole.items()}).engine
    assert {name: getattr(made, name) for name in whole} == whole
    assert EngineConfig(host_bytes=1 << 20, disk_bytes=1, role="decode").disk_bytes == 1
    assert EngineConfig(host_bytes=0, role="encode").host_bytes == 0


def test_fields_are_converted_to_their_types() -> None:
    made = ServeConfig(more_models=["a"], drain_s=3)  # type: ignore[arg-type]
    assert made == ServeConfig(more_models=("a",), drain_s=3.0)
    assert isinstance(made.drain_s, float)
    assert hash(EngineConfig(max_audio_s=60)) == hash(EngineConfig(max_audio_s=60.0))
    with pytest.raises(AttributeError):
        made.port = 1  # type: ignore[misc]


def test_engine_settings_from_a_mapping() -> None:
    assert EngineConfig.from_mapping({"max_requests": 3}) == EngineConfig(max_requests=3)
    with pytest.raises(OptionError, match="did you mean 'max_requests'"):
        EngineConfig.from_mapping({"max_request": 3})
    sent = msgspec.msgpack.encode(EngineConfig(kv_bytes=1 << 20))
    assert msgspec.msgpack.decode(sent, type=EngineConfig) == EngineConfig(kv_bytes=1 << 20)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org")],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert ServeConfig(host=host).loopback is loopback


# --- keys -------------------------------------------------------------------------------------------------


def test_keys_come_from_every_source_and_from_files(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("# clients\nsecret-1\n\n  secret-2  # anna\nsecret#3\nsecret-0\n")
    environ = {"ASR_SERVE_API_KEYS": "secret-0, secret-9", "ASR_SERVE_ADMIN_KEYS_FILE": str(keys)}
    made = load_serve_config(None, environ, {"api_keys_file": str(keys)})
    assert made.api_keys == ("secret-0", "secret-9", "secret-1", "secret-2", "secret#3")
    assert made.admin_keys == ("secret-1", "secret-2", "secret#3", "secret-0")


def test_keys_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("secret-1\n")
    given = collect_values(
        None, {"ASR_SERVE_API_KEYS": "secret-2,secret-3"}, {"api_keys_file": SettingValue(str(file), "flag")}
    )
    made = build_config(given)
    page = config_to_toml(made, given)
    assert '# api_keys = "***"  # 3 in all: env ASR_SERVE_API_KEYS, api_keys_file\n' in page
    assert "secret" not in page + repr(made) + str(made) + f"{made}"
    assert "<3 keys>" in repr(made)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"api_keys": "secret 1"}, "api_keys=*** (flag)"),
        ({"admin_keys": ["secret", 1]}, "admin_keys=*** (flag)"),
        ({"api_keys": "schlüssel-secret"}, "visible ASCII"),
        ({"api_key": "secret"}, "did you mean 'api_keys'"),
    ],
)
def test_errors_never_show_a_key(flags: dict[str, object], part: str) -> None:
    assert "secret" not in expect_error([part], None, {}, flags)


@pytest.mark.parametrize("text", ["", " , "])
def test_an_empty_key_does_not_open_the_server(text: str) -> None:
    expect_error(["api_keys is empty (env ASR_SERVE_API_KEYS)"], None, {"ASR_SERVE_API_KEYS": text})


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "No such file"),
        (b"", "holds no key"),
        (b"# secret\n\n", "holds no key"),
        (b"ok\nsecret key\n", "line 2 is no key"),
        (b"secret,key\n", "line 1 is no key"),
        (b"secret\xff", "not UTF-8"),
    ],
    ids=["missing", "empty", "comments", "space", "comma", "bytes"],  # they name the folder, which errors name
)
def test_an_invalid_key_file_is_refused(tmp_path: Path, content: bytes | None, part: str) -> None:
    file = tmp_path / "keys.txt"
    if content is not None:
        file.write_bytes(content)
    parts = [part, "(env ASR_SERVE_ADMIN_KEYS_FILE)"]
    assert "secret" not in expect_error(parts, None, {"ASR_SERVE_ADMIN_KEYS_FILE": str(file)})


# --- printed ----------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(exclude_categories=["Cs", "Z", "Cc"], exclude_characters=",="), min_size=1)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
CHOICES = {
    "host": st.sampled_from(["localhost", "0.0.0.0", "::1"]),
    "port": st.integers(0, 65_535),
    "model": NAMES,
    "more_models": st.lists(NAMES, max_size=2),
    "aliases": st.dictionaries(NAMES.map("a".__add__), NAMES.map("m".__add__), max_size=3),
    "weights": st.none() | ANY_TEXT,
    "max_duration_s": st.floats(0, exclude_min=True, allow_nan=False),
    "drain_s": st.floats(0, 86_400),
    "cors_origins": st.lists(st.sampled_from(["*", "https://a.org", "http://b:1"])),
    "docs": st.booleans(),
    "log_format": st.sampled_from(["text", "json"]),
    "ring_slots": st.integers(1, 20).map(lambda power: 2**power),
    "engine_threads": st.none() | st.integers(1, 64),
    "engine.kv_bytes": st.integers(1, 10**12),
    "engine.encode_padding": st.floats(0, 1, exclude_min=True, exclude_max=True),
    "engine.encode_frames": st.none() | st.integers(1, 10**6),
}


@given(st.fixed_dictionaries({"max_models": st.integers(3, 10**30)}, optional=CHOICES))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_printed_settings_load_as_the_same(file: Path, values: dict[str, Any]) -> None:
    given = {name: SettingValue(value, "flag --set") for name, value in values.items()}
    made = build_config(given)
    page = config_to_toml(made, given)
    file.write_text(page, "utf-8", newline="")
    assert load_serve_config(str(file), {}) == made
    assert page.count("# flag --set\n") == len(values)


def test_printed_values_say_where_they_come_from(file: Path) -> None:
    file.write_text('\nlog_level = "debug"\n')
    given = collect_values(
        str(file), {"ASR_SERVE_ENGINE__MAX_REQUESTS": "7"}, {"port": SettingValue("9", "flag --port")}
    )
    lines = config_to_toml(build_config(given), given).splitlines()
    assert "port = 9  # flag --port" in lines
    assert f'log_level = "debug"  # file {file}:2' in lines
    assert "max_requests = 7  # env ASR_SERVE_ENGINE__MAX_REQUESTS" in lines
    assert 'host = "127.0.0.1"  # default' in lines
    assert "# weights is not set  # default" in lines
    assert lines.index("[engine]") < lines.index("max_requests = 7  # env ASR_SERVE_ENGINE__MAX_REQUESTS")
    assert f"# {all_settings()['port'].help}" in lines


def test_a_source_with_a_strange_name_stays_in_its_comment(tmp_path: Path) -> None:
    strange = tmp_path / "a\nport = 1.toml"
    strange.write_text("docs = false")
    given = collect_values(str(strange), {}, {})
    assert tomllib.loads(config_to_toml(build_config(given), given))["port"] == 8_000


def test_every_setting_has_help_and_can_be_unset() -> None:
    for name, setting in all_settings().items():
        assert setting.help.endswith("."), name
        assert setting.allowed
        # TOML cannot say none, so what is not printed has to be none by default.
        assert ("or none" in setting.allowed) == (setting.default is None), name


def test_the_page_shows_every_setting() -> None:
    shown = MARKED.search(PAGE.read_text())
    assert shown, "docs/configuration.md has lost its marks"
    assert shown[0] == table(), "write it again: python tests/test_config.py"


def test_the_example_is_a_valid_file() -> None:
    made = load_serve_config(str(ROOT / "examples" / "asr-serve.toml"), {})
    assert made.aliases == {"whisper-1": "moonshine-tiny-en"}
    commented = (ROOT / "examples" / "asr-serve.toml").read_text().replace("# api_keys_file", "api_keys_file")
    assert "api_keys_file" in tomllib.loads(commented)


if __name__ == "__main__":
    PAGE.write_text(MARKED.sub(lambda _: table(), PAGE.read_text()))
