"""FunASR's runtime protocol over the real server: offline, online and 2pass, over TLS too, and what is refused."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running_server import WAIT_S, Running
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
STEP_BYTES = 1_920
"""60 ms, as FunASR's clients send."""


@pytest.fixture(scope="module")
def beckett_pcm(beckett: Path) -> bytes:
    with wave.open(str(beckett)) as file:
        return file.readframes(file.getnframes())


@contextmanager
def calling(server: Running, path: str = "/") -> Iterator[ClientConnection]:
    url = f"{server.url.replace('http', 'ws', 1)}{path}"
    with connect(url, max_size=None, open_timeout=WAIT_S, subprotocols=["binary"]) as line:  # type: ignore[list-item]
        assert line.subprotocol == "binary"
        yield line


def hear(line: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line.recv(WAIT_S))
    return found


def say(line: ClientConnection, audio: bytes, step: int = STEP_BYTES, **options: Any) -> list[dict[str, Any]]:
    """Sends a recording as FunASR's clients do; its answers, up to the last."""
    first = {"chunk_size": [5, 10, 5], "chunk_interval": 10, "wav_name": "a", "is_speaking": True, "itn": True}
    line.send(json.dumps(first | options))
    for at in range(0, len(audio), step):
        line.send(audio[at : at + step])
    line.send(json.dumps({"is_speaking": False}))
    answers = [hear(line)]
    while not answers[-1]["is_final"]:
        answers.append(hear(line))
    return answers


def joined(answers: list[dict[str, Any]], mode: str) -> str:
    return "".join(answer["text"] for answer in answers if answer["mode"] == mode)


@pytest.mark.parametrize("path", ["/", "/ws"])
def test_offline_the_answer_comes_once(server, beckett, beckett_pcm, path):
    with calling(server, path) as line:
        [answer] = say(line, beckett_pcm, mode="offline", wav_name="one")
        assert (answer["text"], answer["mode"], answer["wav_name"]) == (BECKETT, "offline", "one")
        times = json.loads(answer["timestamp"])
        assert len(times) == 12
        assert times == [time for sentence in answer["stamp_sents"] for time in sentence["ts_list"]]
        # Another over the same connection: a whole file.
        [answer] = say(line, beckett.read_bytes(), 7_777, mode="offline", wav_format="wav", wav_name="two")
        assert (answer["text"], answer["wav_name"]) == (BECKETT, "two")


def test_files_as_funasrs_clients_send_them(server, beckett):
    """The C++ client without a mode; the html5 page a stereo file with its header, as samples."""
    with wave.open(str(beckett)) as file, io.BytesIO() as stereo:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        with wave.open(stereo, "wb") as two:
            two.setparams(file.getparams()._replace(nchannels=2, nframes=0))
            two.writeframes(np.repeat(samples, 2).tobytes())
        whole = stereo.getvalue()
    with calling(server) as line:
        [answer] = say(line, beckett.read_bytes(), wav_format="others")
        assert (answer["mode"], answer["text"]) == ("offline", BECKETT)
        [answer] = say(line, whole, 960, mode="offline", wav_format="PCM", audio_fs=16_000)
        assert answer["text"] == BECKETT


def test_two_pass_words_come_first_and_then_sentences(server, beckett_pcm):
    with calling(server) as line:
        answers = say(line, beckett_pcm, mode="2pass")
        again = say(line, beckett_pcm, 33_333, mode="2pass")
    *others, last = answers
    assert joined(answers, "2pass-offline") == joined(again, "2pass-offline") == BECKETT
    assert (last["mode"], last["text"], last["is_final"]) == ("2pass-offline", "", True)
    assert not any(answer["is_final"] for answer in others)
    assert {answer["mode"] for answer in answers} <= {"2pass-online", "2pass-offline"}


def test_online_words_are_final(server, beckett_pcm):
    with calling(server) as line:
        answers = say(line, beckett_pcm, mode="online")
    assert joined(answers, "online") == BECKETT
    assert {answer["mode"] for answer in answers} == {"online"}


def test_an_end_that_is_awaited_and_nothing_said(server):
    with calling(server) as line:
        line.send('{"mode": "2pass", "wav_name": "a", "is_speaking": true}')
        line.send('{"is_speaking": false, "is_end": true}')
        end = {"mode": "2pass-offline", "text": "", "wav_name": "a", "is_final": True, "is_end": True}
        assert hear(line) == end
        line.send('{"is_speaking": false, "is_end": true}')
        assert hear(line) == end


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ('{"mode": "3pass"}', "option_error"),
        ('{"mode": "2pass", "wav_format": "mp3"}', "unsupported_option"),
        ('{"mode": "2pass", "audio_fs": 1}', "option_error"),
        ('{"mode": "2pass", "svs_lang": "xx"}', "option_error"),
        ('{"mode": "2pass", "hotwords": "{"}', "option_error"),
        ('{"mode": "2pass", "hotwrods": "x"}', "unknown_option"),
        ("STOP", "malformed_request"),
        ("[" * 50_000, "malformed_request"),
    ],
)
def test_a_mistake_is_answered_and_the_connection_goes_on(server, message, code):
    with calling(server) as line:
        line.send('{"is_speaking": false}')  # which protocol it is
        assert hear(line)["is_final"] is True
        line.send(message)
        error = hear(line)
        assert (error["event"], error["code"], error["is_end"], error["is_final"]) == ("error", code, True, False)
        assert error["error"] == error["message"]
        line.send('{"is_speaking": false}')
        assert hear(line)["is_final"] is True


def test_audio_behind_refused_options_is_dropped_until_others_come(server, beckett, beckett_pcm):
    """A file of which only samples are allowed is not recognized as samples."""
    with calling(server) as line:
        line.send('{"mode": "offline", "wav_name": "a", "is_speaking": true}')
        for _ in range(2):  # also while the recording before is finishing
            line.send(beckett_pcm)
            line.send('{"is_speaking": false}')
            line.send('{"mode": "2pass", "wav_name": "b", "wav_format": "others", "is_speaking": true}')
            line.send(beckett.read_bytes())
            line.send('{"is_speaking": false}')
            assert hear(line)["text"] == BECKETT
            assert hear(line)["code"] == "unsupported_option"
            assert (end := hear(line))["text"] == ""
            assert end["is_final"] is True
            line.send('{"mode": "offline", "wav_name": "a", "is_speaking": true}')


def test_hotwords_that_the_model_refuses_are_told_and_left_out(server, beckett_pcm):
    with calling(server) as line:
        line.send(json.dumps({"mode": "offline", "wav_name": "a", "is_speaking": True, "hotwords": '{"阿里巴巴": 20}'}))
        assert hear(line)["code"] == "option_error"
        line.send(beckett_pcm)
        line.send('{"is_speaking": false}')
        answer = hear(line)
        assert (answer["mode"], answer["wav_name"], answer["text"]) == ("offline", "a", BECKETT)


def test_options_stand_for_recordings_that_follow(server, beckett_pcm):
    with calling(server) as line:
        line.send('{"mode": "online", "wav_name": "b", "is_speaking": false}')
        assert hear(line)["mode"] == "online"
        for _ in range(2):
            line.send(beckett_pcm[:48_000])
            line.send('{"is_speaking": false}')
            answers = [hear(line)]
            while not answers[-1]["is_final"]:
                answers.append(hear(line))
            assert joined(answers, "online").startswith("Ever")
            assert {answer["wav_name"] for answer in answers} == {"b"}


def test_other_options_after_audio_are_refused(server, beckett_pcm):
    with calling(server) as line:
        line.send('{"mode": "offline", "wav_name": "a"}')
        line.send(beckett_pcm)
        line.send('{"mode": "offline", "wav_name": "a", "is_speaking": true}')  # the same: no matter
        line.send('{"mode": "offline", "wav_name": "b", "is_speaking": true}')
        assert hear(line)["code"] == "out_of_turn"
        line.send('{"is_speaking": false}')
        assert (answer := hear(line))["wav_name"] == "a"
        assert answer["text"] == BECKETT


def test_audio_that_cannot_be_read_ends_the_connection(server):
    with calling(server) as line:
        line.send('{"mode": "offline", "wav_format": "mp3", "is_speaking": true}')
        line.send(b"no audio at all" * 100)
        line.send('{"is_speaking": false}')
        assert hear(line)["code"] == hear(line)["code"] == "not_audio"  # for clients of either protocol
        with pytest.raises(ConnectionClosed, match="1008"):
            line.recv(WAIT_S)


def test_a_client_that_leaves_leaves_nothing(server, beckett_pcm):
    for mode in ("2pass", "offline"):
        with calling(server) as line:
            line.send(json.dumps({"mode": mode, "is_speaking": True}))
            line.send(beckett_pcm[:64_000])
