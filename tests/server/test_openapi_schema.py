"""Requests that schemathesis makes out of /openapi.json, to the running server: does it do what that says?

Its engine runs here as its command does, with a fixed seed: examples, every corner of the schemas (values that are
good and values that are not, wrong methods, missing keys), then random ones. Its fixtures know no pytest 9.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import schemathesis
from case_tiers import exhaustive_after
from hypothesis import strategies
from running_server import Running
from schemathesis.config import SchemathesisConfig
from schemathesis.core.failures import AcceptedNegativeData, Failure
from schemathesis.engine import events, from_schema
from schemathesis.specs.openapi.formats import unregister_string_format

ROUTE = "/v1/audio/transcriptions"
PATHS = (
    ROUTE,
    "/v1/audio/translations",
    "/asr",
    "/detect-language",
    "/inference",
    "/v1/audio/speech",
    "/v1/listen",
    "/v1/speak",
    "/v1/audio/voices",
    "/v1/files",
    "/v1/files/{file_id}",
    "/v1/files/{file_id}/content",
    "/v1/batches",
    "/v1/batches/{batch_id}",
    "/v1/batches/{batch_id}/cancel",
    "/v1/voices",
    "/v1/voices/jobs",
    "/v1/voices/jobs/{job}",
    "/v1/voices/jobs/{job}/events",
    "/v1/voices/{name}",
    "/v1/voices/{name}/export",
    "/v1/models",
    "/v1/models/{model}",
    "/v1/models/{model}/load",
    "/v1/models/{model}/unload",
    "/v1/models/{model}/renew",
    "/v1/key",
    "/v1/keys",
    "/v1/evaluations",
    "/v1/evaluations/{run_id}",
    "/v1/evaluations/{run_id}/audio",
    "/v1/stream/{session_id}/flush",
    "/v1/stream/{session_id}/end",
    "/health",
    "/ready",
    "/metrics",
)
OPEN = ("/asr", "/v1/audio/speech", "/v1/models/{model}", "/v1/models/{model}/load", "/v1/stream/{session_id}/end")
"""One path of each kind, for which the server without keys is asked in `make test`."""
OPEN_TOO = (ROUTE, "/v1/voices", "/v1/models/{model}/unload")
"""Others for which it is asked in `make test-slow`."""
LATER = tuple(path for path in PATHS if path.startswith(("/v1/files/", "/v1/batches/")))
"""Those that `make test-all` asks alone: they answer 404 to what is random."""
KEY = "secret-boss"
"""An administrator's, so that load, unload and renew get to their names. Those are random: nothing is unloaded."""

GRANULARITIES = "timestamp_granularities[]"

Document = dict[str, Any]


@pytest.fixture(scope="module")
def locked(serve: Callable[..., Running]) -> Running:
    return serve(max_duration_s=5, strict_fields=True, api_keys=("secret-user",), admin_keys=(KEY,))


@pytest.fixture
def clips_sent(wav: Callable[..., bytes]) -> Iterator[None]:
    """In place of random bytes. In bad requests, too: otherwise they would be refused for their file."""
    schemathesis.openapi.format("binary", strategies.just(wav(1.5)))
    yield
    unregister_string_format("binary")


def ask(server: Running, path: str, accepted: list[str], examples: int, document: Document) -> list[int]:
    """Send what the document's schema of `path` suggests, and fail on what is wrong with the answers; `accepted`:
    statuses for what keeps to the schema. All statuses that came."""
    settings = {
        "seed": 20_26,
        "headers": {"Authorization": f"Bearer {KEY}"} if server.config.api_keys else {},
        "generation": {"max-examples": examples, "deterministic": True, "database": "none"},
        "checks": {"max_response_time": 120.0, "positive_data_acceptance": {"expected-statuses": accepted}},
    }  # and all other checks. `ignored_auth` asks again with a wrong key and with none
    schema = schemathesis.openapi.from_dict(document, config=SchemathesisConfig.from_dict(settings))
    schema.config.update(base_url=server.url)

    @schema.hook
    def filter_failure(context: object, failure: Failure, case: Any, response: object) -> bool:
        form = case.body.items() if isinstance(case.body, dict) else ()
        left_out = (case.query or {}).get("limit") == {}  # sent as `limit=`
        good = left_out or any(_good_in_words(*field) for field in form)
        return not (isinstance(failure, AcceptedNegativeData) and good)

    wrong, statuses = [], []
    for event in from_schema(schema.include(path=path)).execute():
        match event:
            case events.NonFatalError() | events.FatalError():
                wrong.append(str(event))
            case events.ScenarioFinished(recorder=found):
                for sent, checks in found.checks.items():
                    for failure in (check.failure_info for check in checks if check.failure_info is not None):
                        body = found.cases[sent].value.body
                        form = {k: v for k, v in body.items() if k != "file"} if isinstance(body, dict) else body
                        wrong.append(f"{failure.failure}\n{form}\n{failure.code_sample[:1_000]}")
                statuses += [each.response.status_code for each in found.interactions.values() if each.response]
    assert not wrong, "\n\n".join(wrong)
    server.expect_empty()
    assert not server.counted("asr_serve_rejections_total", reason="internal_error")  # in a stream it is no 500
    return statuses


def _good_in_words(name: str, value: object) -> bool:
    """Returns whether the document says in words that this is good: a field without a value, 0 for false."""
    if name in ("stream", "vad", "spk", "timestamp", "itn"):  # an empty list is no field at all
        return value == [] or (value in (0, 1) and not isinstance(value, bool))
    if name in ("prompt", "hotwords", "file"):  # good in its schema, and nothing to look at for a file
        return False
    values = value if isinstance(value, list) else [value]
    return "" in values or (name == GRANULARITIES and not values)


def read(server: Running) -> Document:
    return dict(server.http.get("/openapi.json").json())


def tier(path: str, keys: bool) -> Sequence[pytest.MarkDecorator]:
    if path in LATER:
        return [pytest.mark.slow, pytest.mark.exhaustive]
    if keys or path in OPEN:
        return ()
    return [pytest.mark.slow] if path in OPEN_TOO else [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        pytest.param(path, keys, marks=tier(path, keys), id=f"{path}-{name}")
        for path in PATHS
        for name, keys in (("locked", True), ("open", False))
    ],
)
def test_the_document_is_kept_to(locked, server, path, keys):
    # Random bytes are no audio, and random fields do not go together: 400. A random name is no model: 404; and no
    # session: 410. Without keys nobody is an administrator: 401, 403.
    accepted = ["2xx", "400", "404", "410"] + ([] if keys else ["401", "403"])
    asked = locked if keys else server
    assert ask(asked, path, accepted, 12, read(asked))


def test_further_fields_are_allowed_unless_the_server_is_strict(server, locked):
    for asked, allowed in ((server, True), (locked, False)):
        content = read(asked)["paths"][ROUTE]["post"]["requestBody"]["content"]
        assert ("additionalProperties" not in content["multipart/form-data"]["schema"]) == allowed


def test_these_are_all_paths(server):
    assert set(read(server)["paths"]) == set(PATHS)


TOGETHER: dict[str, tuple[str, list[str], Document]] = {
    "plain": (
        ROUTE,
        [],
        {
            "language": {"enum": ["en", "English", "en-GB", "英文"]},
            "response_format": {"enum": ["json", "text", "srt", "vtt", "verbose_json", "jsonl", "ctm", "textgrid"]},
            "temperature": {},
            "stream": {"enum": [False]},
            "vad": {},
            "prompt": {"maxLength": 0},
            "beam": {"maximum": 8},
            "long_form": {"enum": ["parallel"]},
            "itn": {},
            "known_speaker_names[]": {"maxItems": 0},
            "known_speaker_references[]": {"maxItems": 0},
        },
    ),
    "speakers": (
        ROUTE,
        ["response_format"],
        {"response_format": {"enum": ["diarized_json", "rttm"]}, "num_speakers": {}, "spk": {"enum": [True]}},
    ),
    "streamed": (ROUTE, [], {"stream": {}, "response_format": {"enum": ["json", "text"]}, "vad": {}}),
    "schedule": (ROUTE, [], {"silence_schedule": {"enum": ["inf:300", "5000:1500,20000:800,inf:300"]}}),
    "logprobs": (ROUTE, [], {"include[]": {}, "chunking_strategy": {"enum": ["auto"]}, "stream": {}}),
    "times": (
        ROUTE,
        ["response_format"],
        {GRANULARITIES: {"minItems": 1}, "response_format": {"enum": ["verbose_json"]}},
    ),
    "strategy": (
        ROUTE,
        ["chunking_strategy[type]"],
        {
            "chunking_strategy[type]": {},
            "chunking_strategy[threshold]": {},
            "chunking_strategy[prefix_padding_ms]": {},
            "chunking_strategy[silence_duration_ms]": {},
        },
    ),
    "asr": ("/asr", [], {"language": {"enum": ["English"]}, "spk": {}, "timestamp": {}, "itn": {}}),
}
"""Fields that go together, those of them that are needed, and what else the document says of values in words."""


@pytest.mark.slow
@pytest.mark.parametrize("name", exhaustive_after(4, TOGETHER))
@pytest.mark.usefixtures("clips_sent")
def test_good_forms_are_heard_and_bad_ones_refused(locked, name):
    path, needed, narrowed = TOGETHER[name]
    document = read(locked)
    (content,) = document["paths"][path]["post"]["requestBody"]["content"].values()
    del content["example"]  # its file is a name
    form = content["schema"]
    fields = form["properties"]
    form["properties"] = {"file": fields["file"]} | {name: fields[name] | more for name, more in narrowed.items()}
    form["required"] += needed
    statuses = ask(locked, path, ["200"], 20, document)
    assert statuses.count(200) > 10
    assert statuses.count(400) > 10
