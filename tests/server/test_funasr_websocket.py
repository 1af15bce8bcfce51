"""FunASR's WebSockets over the real server, with real speech: what is said in which turn, and how it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import numpy as np
import pytest
from running_server import WAIT_S, Running, eventually
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from asr_serve.audio.reader import open_audio
from asr_serve.config import ServeConfig
from asr_serve.errors import OptionError
from asr_serve.protocols.funasr.websocket import FunAsrOptions
from asr_serve.server.realtime.funasr import endpoint, session_defaults
from asr_serve.server.realtime.funasr.session_defaults import FunAsrSessionDefaults, validate_options

RATE_BYTES = 32_000
PACKET_BYTES = 3_200
"""100 ms."""
STARTED, STOPPED = {"event": "started"}, {"event": "stopped"}
BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."


class Caller:
    """A client of FunASR's."""

    def __init__(self, line: ClientConnection) -> None:
        self.line = line

    def send(self, what: str | bytes) -> None:
        self.line.send(what)

    def pour(self, pcm: bytes, packet_bytes: int = PACKET_BYTES) -> None:
        for at in range(0, len(pcm), packet_bytes):
            self.line.send(pcm[at : at + packet_bytes])

    def hear(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.line.recv(WAIT_S))
        return found

    def ask(self, command: str) -> dict[str, Any]:
        self.send(command)
        return self.hear()

    def until(self, done: Callable[[dict[str, Any]], object]) -> list[dict[str, Any]]:
        """What is heard, up to the first that is meant."""
        found = [self.hear()]
        while not done(found[-1]):
            found.append(self.hear())
        return found

    def until_stopped(self) -> list[dict[str, Any]]:
        return self.until(lambda answer: answer == STOPPED)

    def closed(self) -> int:
        """The code that the server closes with."""
        try:
            while True:
                self.line.recv(WAIT_S)
        except ConnectionClosed as closed:
            return int(closed.rcvd.code) if closed.rcvd else 1_006


@contextmanager
def calling(server: Running, path: str = "/", headers: dict[str, str] | None = None, **query: str) -> Iterator[Caller]:
    url = f"{server.url.replace('http', 'ws', 1)}{path}" + (f"?{urlencode(query)}" if query else "")
    with connect(url, additional_headers=headers, max_size=None, open_timeout=WAIT_S) as line:
        yield Caller(line)


def pcm_of(path: Path) -> bytes:
    return (np.concatenate(list(open_audio(path))) * 32_767).astype("<i2").tobytes()


@pytest.fixture(scope="session")
def beckett_pcm(beckett: Path) -> bytes:
    return pcm_of(beckett)


@pytest.fixture(scope="session")
def cities_pcm(cities: Path) -> bytes:
    return pcm_of(cities)


def texts(answer: dict[str, Any]) -> list[str]:
    return [sentence["text"] for sentence in answer["sentences"]]


def refusal(caller: Caller) -> tuple[str, int]:
    """The code of the one event before the end, and of the end."""
    told = caller.hear()
    assert (told["event"], set(told) - {"retry_after_ms"}) == ("error", {"event", "code", "message"})
    return told["code"], caller.closed()


# --- the exchanges of the guide --------------------------------------------------------------------------


def test_realtime_words_come_while_they_are_spoken(server, beckett_pcm):
    with calling(server) as caller:
        assert caller.ask("START") == STARTED
        answers = []
        for at in range(0, len(beckett_pcm), 2 * RATE_BYTES):
            caller.pour(beckett_pcm[at : at + 2 * RATE_BYTES])
            if 2 * RATE_BYTES <= at <= 6 * RATE_BYTES:  # between are whole words
                before = answers[-1]["partial"] if answers else ""
                answers += caller.until(lambda answer, before=before: answer.get("partial") not in (None, "", before))
        caller.send("STOP")
        *later, final, stopped = caller.until_stopped()
        answers += later
    assert stopped == STOPPED
    assert set(final) == {"sentences", "is_final", "duration_ms"}
    assert final["is_final"] is True
    assert final["duration_ms"] == len(beckett_pcm) * 1_000 // RATE_BYTES
    assert texts(final) == [BECKETT]
    [sentence] = final["sentences"]
    assert set(sentence) == {"text", "start", "end"}
    assert (type(sentence["start"]), type(sentence["end"])) == (int, int)
    assert 0 <= sentence["start"] < 500 < 8_000 < sentence["end"] <= 10_000
    assert len(answers) >= 3
    for answer in answers:
        assert set(answer) - {"partial_start_ms"} == {"sentences", "partial", "is_final", "duration_ms"}
        assert answer["is_final"] is False
        assert 0 < answer["duration_ms"] <= final["duration_ms"]
    partials = [answer["partial"] for answer in answers if answer["partial"]]
    assert partials[0].startswith("Ever")
    assert len(partials[0]) < len(partials[-1])


def test_sentences_are_locked_for_ever(server, cities_pcm):
    with calling(server, silence_schedule="inf:300") as caller:
        assert caller.ask("START") == STARTED
        for at in range(0, 20 * RATE_BYTES, PACKET_BYTES):
            caller.send(cities_pcm[at : at + PACKET_BYTES])
            time.sleep(0.01)
        caller.send("STOP")
        *answers, final, _ = caller.until_stopped()
    before: list[Any] = []
    for answer in [*answers, final]:
        assert answer["sentences"][: len(before)] == before
        before = answer["sentences"]
    assert len(before) >= 3
    ends = [(s["start"], s["end"]) for s in before]
    assert all(start < end for start, end in ends)
    assert ends == sorted(ends)


def test_only_new_sentences_on_request(server, cities_pcm):
    def hear(**query: str) -> list[dict[str, Any]]:
        with calling(server, silence_schedule="inf:300", **query) as caller:
            assert caller.ask("START") == STARTED
            caller.pour(cities_pcm[: 20 * RATE_BYTES])
            caller.send("STOP")
            return caller.until_stopped()[:-1]

    whole = hear()[-1]["sentences"]
    assert [s for answer in hear(sentences="new") for s in answer["sentences"]] == whole


def test_offline_is_what_post_asr_answers(server, cities, cities_pcm):
    asked = server.http.post("/asr", files={"file": ("cities.wav", cities.read_bytes())}).json()
    with calling(server, "/ws") as caller:
        assert caller.ask("START") == STARTED
        assert caller.ask("LANGUAGE:English") == {"event": "language_set", "language": "English"}
        caller.send(cities_pcm)
        caller.send("STOP")
        final = caller.hear()
        assert caller.hear() == STOPPED
    assert set(final) == {"sentences", "is_final", "duration_ms"}
    assert final["duration_ms"] == round(1_000 * asked["duration"])
    assert final["sentences"] == [
        {"text": s["text"], "start": round(1_000 * s["start"]), "end": round(1_000 * s["end"])}
        for s in asked["segments"]
    ]
    assert len(final["sentences"]) > 1


def test_offline_nothing_said(server):
    with calling(server, "/ws") as caller:
        assert caller.ask("START") == STARTED
        assert caller.ask("STOP") == {"sentences": [], "is_final": True, "duration_ms": 0}
        assert caller.hear() == STOPPED


@pytest.mark.parametrize("path", ["/", "/ws"])
def test_one_socket_many_sessions(server, beckett_pcm, path):
    with calling(server, path) as caller:
        for _ in range(3):
            assert caller.ask("START") == STARTED
            caller.pour(beckett_pcm)
            caller.send("STOP")
            assert texts(caller.until_stopped()[-2]) == [BECKETT]


def test_a_start_behind_a_stop_waits_for_the_text(server, beckett_pcm):
    with calling(server) as caller:
        caller.send("START")
        caller.pour(beckett_pcm)
        caller.send("STOP")
        caller.send("START")
        caller.send("STOP")
        said = caller.until_stopped()
        assert texts(said[-2]) == [BECKETT]
        assert caller.hear() == STARTED
        assert caller.until_stopped()[-2] == {"sentences": [], "is_final": True, "duration_ms": 0}


# --- commands in any order, and what is no command -----------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/ws"])
def test_a_client_that_changes_to_the_runtime_protocol_is_told_and_closed(server, path):
    with calling(server, path) as caller:
        assert caller.ask("START") == STARTED
        caller.send('{"mode":"2pass","chunk_size":[5,10,5],"wav_name":"x","is_speaking":true}')
        caller.send(bytes(PACKET_BYTES))
        assert refusal(caller) == ("unsupported_protocol", 1_008)


@pytest.mark.parametrize("path", ["/", "/ws"])
def test_commands_in_any_order(server, beckett_pcm, path):
    def refused(command: str, code: str) -> None:
        told = caller.ask(command)
        assert (told["event"], told["code"]) == ("error", code), told
        assert told["message"].count(".") >= 2

    with calling(server, path) as caller:
        refused("STOP", "out_of_turn")
        refused("start", "unknown_command")
        refused("", "unknown_command")
        refused("{}", "unknown_command")
        refused("LANGUAGE:中文", "option_error")
        refused("WORDS:some", "option_error")
        hotwords = {"event": "hotwords_set", "hotwords": ["Beckett:2", "Godot"], "used": True}
        assert caller.ask("HOTWORDS:Beckett:2,Godot") == hotwords
        refused(f"HOTWORDS:{'x' * 201}", "option_error")
        assert caller.ask("WORDS:false") == {"event": "words_set", "words": False, "used": True}
        assert caller.ask("LANGUAGE:en") == {"event": "language_set", "language": "en"}
        assert caller.ask("LANGUAGE:auto") == {"event": "language_set", "language": "auto"}
        assert caller.ask("START") == STARTED
        refused("START", "out_of_turn")
        assert caller.ask("LANGUAGE:English")["event"] == "language_set"
        caller.pour(beckett_pcm[:64_000])
        caller.send("NONSENSE")
        assert caller.until(lambda a: "code" in a)[-1]["code"] == "unknown_command"
        caller.send("LANGUAGE:klingon")
        assert caller.until(lambda a: "code" in a)[-1]["code"] == "option_error"
        caller.send("HOTWORDS:")
        told = caller.until(lambda a: a.get("event"))[-1]
        assert (told["hotwords"], told["used"]) == ([], False)
        assert "next START" in told["message"]
        caller.send("WORDS:true")
        assert caller.until(lambda a: a.get("event"))[-1]["used"] is False
        caller.pour(beckett_pcm[64_000:])
        caller.send("STOP")
        final = caller.until_stopped()[-2]
        assert texts(final) == [BECKETT]
        assert "words" not in final["sentences"][0]
        refused("STOP", "out_of_turn")
        assert caller.ask("START") == STARTED  # and from here on, words
        caller.pour(beckett_pcm)
        caller.send("STOP")
        expect_words(caller.until_stopped()[-2])


def expect_words(answer: dict[str, Any]) -> None:
    """Every sentence has its words, in order, inside it."""
    assert answer["sentences"]
    for sentence in answer["sentences"]:
        words = sentence["words"]
        assert " ".join(word["word"] for word in words) == sentence["text"]
        times = [time for word in words for time in (word["start"], word["end"])]
        whole = [sentence["start"], *times, sentence["end"]]
        assert whole == sorted(whole)
        assert all(isinstance(time, int) for time in whole)


@pytest.mark.parametrize("path", ["/", "/ws"])
def test_words_by_the_query_and_by_command(server, beckett_pcm, path):
    with calling(server, path, words="true") as caller:
        assert caller.ask("START") == STARTED
        caller.pour(beckett_pcm)
        caller.send("STOP")
        asked = caller.until_stopped()[-2]
        expect_words(asked)
    with calling(server, path) as caller:
        assert caller.ask("START") == STARTED
        assert caller.ask("WORDS:true") == {"event": "words_set", "words": True, "used": True}  # no audio came yet
        caller.pour(beckett_pcm)
        caller.send("STOP")
        assert caller.until_stopped()[-2] == asked


@pytest.mark.parametrize("path", ["/", "/ws"])
def test_audio_before_start_is_dropped_and_said_so_once(server, beckett_pcm, path):
    with calling(server, path) as caller:
        for _ in range(2):
            caller.pour(beckett_pcm[:64_000])
            assert caller.hear()["code"] == "out_of_turn"
            assert caller.ask("START") == STARTED
            caller.pour(beckett_pcm)
            caller.send("STOP")
            assert texts(caller.until_stopped()[-2]) == [BECKETT]


@pytest.mark.parametrize("path", ["/", "/ws"])
def test_frames_cut_in_the_middle_of_samples(server, beckett_pcm, path):
    with calling(server, path) as caller:
        assert caller.ask("START") == STARTED
        caller.pour(beckett_pcm, 3_201)
        caller.send(b"")
        caller.send("STOP")
        assert texts(caller.until_stopped()[-2]) == [BECKETT]
        assert caller.ask("START") == STARTED
        caller.pour(beckett_pcm + b"\x01")
        caller.send("STOP")
        *before, final, _ = caller.until_stopped()
        assert [answer["code"] for answer in before if "code" in answer] == ["malformed_request"]
        assert texts(final) == [BECKETT]


@pytest.mark.parametrize("path", ["/", "/ws"])
def test_ten_thousand_tiny_packets(server, beckett_pcm, path):
    with calling(server, path) as caller:
        assert caller.ask("START") == STARTED
        caller.pour(beckett_pcm, len(beckett_pcm) // 10_000)
        caller.send("STOP")
        assert texts(caller.until_stopped()[-2]) == [BECKETT]


def test_a_frame_too_large_is_dropped_and_the_session_goes_on(serve, beckett_pcm):
    server = serve(max_frame_bytes=4_096)
    with calling(server) as caller:
        assert caller.ask("START") == STARTED
        caller.send(bytes(4_099))
        told = caller.hear()
        assert told["code"] == "audio_too_large"
        assert "4099" in told["message"]
        assert "4096" in told["message"]
        caller.send(bytes(1))  # the other half of its last sample
        caller.pour(beckett_pcm)
        caller.send("STOP")
        assert texts(caller.until_stopped()[-2]) == [BECKETT]
    server.expect_empty()


def test_a_frame_that_granian_refuses_closes_the_socket(server):
    with calling(server) as caller:
        assert caller.ask("START") == STARTED
        with suppress(ConnectionClosed):
            caller.send(bytes(17 << 20))
            caller.line.recv(WAIT_S)
        # The reason may be lost on the way: what the client still sends is answered with a reset.
        assert caller.line.close_code in (1_009, 1_006)
    server.expect_empty()


def test_a_session_too_long_is_finished_and_closed(serve, cities_pcm, beckett_pcm):
    server = serve(max_session_s=5.0, max_duration_s=8.0)
    for path, pcm in (("/", cities_pcm), ("/ws", beckett_pcm)):
        with calling(server, path) as caller:
            assert caller.ask("START") == STARTED
            caller.pour(pcm)
            *_, final, stopped = caller.until_stopped()
            assert (final["is_final"], stopped) == (True, STOPPED)
            assert len(texts(final)) == 1
            *_, late = caller.until(lambda answer: "code" in answer)
            assert (late["code"], caller.closed()) == ("audio_too_long", 1_008)
    server.expect_empty()


# --- who may come in --------------------------------------------------------------------------------------


def test_keys(serve, caplog):
    server = serve(api_keys=("s3cret",))
    with calling(server) as caller:
        assert refusal(caller) == ("invalid_api_key", 1_008)
    with calling(server, api_key="wr0ng") as caller:
        assert refusal(caller) == ("invalid_api_key", 1_008)
    with calling(server, headers={"Authorization": "Bearer s3cret"}) as caller:
        assert caller.ask("START") == STARTED
    with calling(server, api_key="s3cret") as caller:
        assert caller.ask("START") == STARTED
    server.expect_empty()
    assert "s3cret" not in caplog.text
    assert "wr0ng" not in caplog.text


def test_no_such_path(server):
    with calling(server, "/wss") as caller:
        assert refusal(caller) == ("no_such_route", 1_008)


@pytest.mark.slow
def test_the_query_is_read_or_refused(server):
    for query, code in (
        ({"model": "moonshine-base-en"}, "model_not_loaded"),
        ({"model": "whisper-9"}, "model_not_found"),
        ({"sentence": "new"}, "option_error"),
        ({"sentences": "old"}, "option_error"),
        ({"partial_ms": "1"}, "option_error"),
        ({"silence_schedule": "never"}, "option_error"),
    ):
        with calling(server, **query) as caller:
            assert refusal(caller) == (code, 1_008), query
    with calling(server, model="whisper-1", partial_ms="960") as caller:
        assert caller.ask("START") == STARTED


@pytest.mark.parametrize(
    ("allowed", "origin", "comes_in"),
    [
        ((), "https://evil.example", False),
        ((), "null", False),
        ((), "own", True),
        (("https://good.example",), "https://good.example", True),
        (("https://good.example",), "https://evil.example", False),
        (("*",), "null", True),
    ],
)
def test_pages_of_other_origins(serve, server, allowed, origin, comes_in):
    server = serve(cors_origins=allowed) if allowed else server
    with calling(server, headers={"Origin": server.url if origin == "own" else origin}) as caller:
        if comes_in:
            assert caller.ask("START") == STARTED
        else:
            assert refusal(caller) == ("not_allowed", 1_008)


def test_full(serve):
    server = serve(max_live_sessions=2)
    with calling(server) as one, calling(server, "/ws") as two:
        assert (one.ask("START"), two.ask("START")) == (STARTED, STARTED)
        with calling(server) as three:
            told = three.hear()
            assert (told["code"], three.closed()) == ("at_capacity", 1_013)
            assert told["retry_after_ms"] > 0
    eventually(lambda: server.gate.live_sessions == 0)
    with calling(server) as three:
        assert three.ask("START") == STARTED


def test_a_key_has_its_share_and_its_rate(serve):
    server = serve(api_keys=("k1", "k2"), concurrent_per_key=1, requests_per_minute_per_key=3)
    with calling(server, "/ws", api_key="k1") as one:
        assert one.ask("START") == STARTED
        with calling(server, api_key="k1") as two:
            assert refusal(two) == ("at_capacity", 1_013)
        with calling(server, api_key="k2") as two:
            assert two.ask("START") == STARTED
    eventually(lambda: server.gate.live_sessions == 0)
    for _ in range(2):
        with calling(server, api_key="k1") as one:
            assert one.ask("START") == STARTED
        eventually(lambda: server.gate.live_sessions == 0)
    with calling(server, api_key="k1") as one:
        assert refusal(one) == ("rate_limit_exceeded", 1_013)


def test_a_recording_takes_a_place_among_the_requests(serve, wav):
    server = serve(max_concurrent=1)
    with calling(server, "/ws") as one:
        assert one.ask("START") == STARTED
        with calling(server, "/ws") as two:
            two.send("START")
            assert refusal(two) == ("at_capacity", 1_013)
        assert server.http.post("/asr", files={"file": ("a.wav", wav(2))}).status_code == 429
        one.send("STOP")
        one.until_stopped()
        assert server.http.post("/asr", files={"file": ("a.wav", wav(2))}).status_code == 200
    server.expect_empty()


# --- how it ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/ws"])
@pytest.mark.parametrize("when", ["idle", "speaking", "finishing"])
def test_a_client_that_is_gone_leaves_nothing(server, beckett_pcm, path, when):
    before = server.counted("asr_serve_live_sessions_total", route=path, end="client_gone")
    for _ in range(5):
        with calling(server, path) as caller:
            assert caller.ask("START") == STARTED
            if when != "idle":
                caller.pour(beckett_pcm)
            if when == "finishing":
                caller.send("STOP")
            caller.line.socket.shutdown(2)
    server.expect_empty()
    gone = server.counted("asr_serve_live_sessions_total", route=path, end="client_gone") - before
    assert gone == 5 or when == "finishing"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/", "/ws"])
def test_a_client_that_says_nothing(serve, beckett_pcm, path):
    server = serve(session_idle_s=1.0)
    with calling(server, path) as caller:
        assert refusal(caller) == ("idle_timeout", 1_008)
    with calling(server, path) as caller:
        assert caller.ask("START") == STARTED
        caller.pour(beckett_pcm)
        *_, final, _ = caller.until_stopped()
        assert texts(final) == [BECKETT]
        assert refusal(caller) == ("idle_timeout", 1_008)
    server.expect_empty()


@pytest.mark.parametrize("path", ["/", "/ws"])
def test_who_drains_tells_finishes_and_closes(serve, beckett_pcm, path):
    server = serve()
    with calling(server, path) as idle, calling(server, path) as caller:
        assert caller.ask("START") == STARTED
        caller.pour(beckett_pcm)
        eventually(lambda: server.counted("asr_serve_live_audio_seconds_total", route=path) > 9.9)

        async def drain() -> None:
            server.gate.drain()

        server.call(drain())
        assert refusal(idle) == ("draining", 1_012)
        *before, final, _ = caller.until_stopped()
        assert [answer["code"] for answer in before if "code" in answer] == ["draining"]
        assert texts(final) == [BECKETT]
        assert caller.closed() == 1_012
        with calling(server, path) as late:
            assert refusal(late) == ("draining", 1_012)
    server.expect_empty()


def test_who_waits_no_longer_breaks_off(serve):
    server = serve()
    with calling(server) as caller:
        assert caller.ask("START") == STARTED

        async def break_off() -> None:
            server.gate.cancel_all()

        server.call(break_off())
        assert refusal(caller) == ("draining", 1_012)
    server.expect_empty()


@pytest.mark.slow
def test_a_client_that_never_reads_is_dropped_and_holds_up_nobody(server, beckett_pcm, monkeypatch):
    monkeypatch.setattr(endpoint, "OUTBOX_SEND_TIMEOUT_S", 1.0)
    before = server.counted("asr_serve_live_sessions_total", route="/", end="client_gone")
    url = server.url.replace("http", "ws", 1)
    with connect(url, max_queue=1, ping_interval=None, close_timeout=1) as deaf:
        deaf.send("START")
        words = "HOTWORDS:" + ",".join([" ".join(["word"] * 40)] * 300)
        deaf.socket.settimeout(WAIT_S)
        with suppress(ConnectionClosed):
            for _ in range(2_000):  # 120 MB: more than all buffers between us
                deaf.send(words)
        with calling(server) as caller:
            assert caller.ask("START") == STARTED
            caller.pour(beckett_pcm)
            caller.send("STOP")
            assert texts(caller.until_stopped()[-2]) == [BECKETT]
        eventually(lambda: server.counted("asr_serve_live_sessions_total", route="/", end="client_gone") == before + 1)
    server.expect_empty()


# --- defaults of the server -------------------------------------------------------------------------------


def test_defaults_that_the_model_does_not_take_end_the_start(serve, tmp_path):
    (tmp_path / "words").write_text("Godot\n")
    (tmp_path / "weights").write_text("Godot:-1\n")
    server = serve(funasr_language="English", funasr_hotwords_file=str(tmp_path / "words"))
    FunAsrSessionDefaults(server.config).check(server.engines.get())
    for settings, said in (
        ({"funasr_language": "zh"}, "funasr_language=zh: unknown language for moonshine-tiny-en"),
        ({"funasr_hotwords_file": str(tmp_path / "weights")}, "funasr_hotwords_file=.*Godot"),
    ):
        with pytest.raises(OptionError, match=said):
            FunAsrSessionDefaults(ServeConfig(**settings)).check(server.engines.get())


def test_defaults_are_read_once_and_checked_once_for_each_model(serve, tmp_path, monkeypatch):
    """Ten thousand hotwords are neither read nor checked again for each socket."""
    checked = []

    def validate(engine, options):
        checked.append(options)
        validate_options(engine, options)

    words = tmp_path / "words"
    words.write_text("Godot\nPozzo\n")
    monkeypatch.setattr(session_defaults, "validate_options", validate)
    engine = serve().engines.get()
    defaults = FunAsrSessionDefaults(ServeConfig(funasr_language="en", funasr_hotwords_file=str(words)))
    words.unlink()
    defaults.check(engine)
    wanted = FunAsrOptions(language="en", hotwords=("Godot", "Pozzo"))
    checked.clear()
    for options in (FunAsrOptions(), FunAsrOptions(words=True), FunAsrOptions()):
        assert defaults.apply(engine, options) == msgspec.structs.replace(wanted, words=options.words)
    assert checked == [FunAsrOptions(language="en"), wanted]
    with pytest.raises(OptionError, match="funasr_hotwords_file"):
        FunAsrSessionDefaults(ServeConfig(funasr_hotwords_file=str(words)))


@pytest.mark.one_server("an ingress that starts refuses defaults that its models cannot follow")
@pytest.mark.parametrize("path", ["/", "/ws"])
def test_defaults_of_another_model_are_left_out(serve, tmp_path, beckett_pcm, path):
    """The server of this socket's model has defaults for another one."""
    (tmp_path / "weights").write_text("Godot:-1\n")
    server = serve(funasr_language="zh", funasr_hotwords_file=str(tmp_path / "weights"))
    with calling(server, path) as caller:
        assert caller.ask("START") == STARTED
        caller.pour(beckett_pcm)
        caller.send("STOP")
        assert texts(caller.until_stopped()[-2]) == [BECKETT]


# --- what is told of it -----------------------------------------------------------------------------------


@pytest.mark.one_server("an ingress tells the metrics of its replicas too, and logs in its own process")
def test_metrics_and_one_line(serve, beckett_pcm, caplog):
    caplog.set_level("INFO", "asr_serve.access")
    server = serve(api_keys=("k1",))
    with calling(server, api_key="k1") as caller:
        assert caller.ask("START") == STARTED
        assert server.counted("asr_serve_live_open_sessions", route="/") == 1
        for at in range(0, len(beckett_pcm), 3 * RATE_BYTES):
            caller.pour(beckett_pcm[at : at + 3 * RATE_BYTES])
            if at < 9 * RATE_BYTES:
                caller.until(lambda answer: answer.get("partial"))
        caller.send("STOP")
        caller.until_stopped()
    eventually(lambda: server.counted("asr_serve_live_sessions_total", route="/", end="done") == 1)
    assert server.counted("asr_serve_live_open_sessions", route="/") == 0
    assert server.counted("asr_serve_live_audio_seconds_total", route="/") == pytest.approx(len(beckett_pcm) / 32_000)
    assert server.counted("asr_serve_live_final_seconds_count", route="/") == 1
    assert server.counted("asr_serve_live_final_seconds_sum", route="/") > 0
    assert server.counted("asr_serve_live_partial_interval_seconds_count", route="/") > 1
    [line] = [record for record in caplog.records if getattr(record, "ended", None) == "done"]
    assert (line.method, line.route, line.status, line.client) == ("WEBSOCKET", "/", 101, "key-1")
    assert line.audio_ms == round(len(beckett_pcm) / 32)
    assert line.model == "moonshine-tiny-en"
    with calling(server) as caller:
        refusal(caller)
    eventually(lambda: server.counted("asr_serve_live_sessions_total", route="/", end="invalid_api_key") == 1)
    assert server.counted("asr_serve_rejections_total", reason="invalid_api_key") == 1
    assert server.counted("asr_serve_requests_total", route="/", method="WEBSOCKET", status="101") == 0
