"""A voice is cloned by the real process, beside serving."""

from __future__ import annotations

import pytest
from running_server import eventually
from test_cloning_routes import ADMIN, BOSS, look, over

from asr_serve.config import EngineConfig
from asr_serve.models.auxiliary import ge2e
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import tts_card
from asr_serve.voices.cloned_voice import EXAMPLE
from asr_serve.voices.voice_store import VoiceStore


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_real_voice_beside_serving(serve, tmp_path, cities, wav):
    """44 s of somebody, without a text: heard, cut, learnt while others are served, and there."""
    if store.published_folder(tts_card("fastpitch-en")) is None or store.published_folder(ge2e.CARDS[0]) is None:
        pytest.skip("the weights of fastpitch-en or of the speaker encoder are not here")
    server = serve(admin_keys=(BOSS,), engine=EngineConfig(voices_dir=str(tmp_path)))
    form = {"name": "dickens", "consent": EXAMPLE, "minutes": "0.3"}
    files = [("files", ("two_cities.wav", cities.read_bytes()))]
    job = server.http.post("/v1/voices", data=form, files=files, headers=ADMIN).json()
    eventually(lambda: look(server, job)["state"] == "running")
    heard = server.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav(4))})
    assert heard.status_code == 200
    done = over(server, job)
    assert done["state"] == "done", done["error"]
    assert len([clip for clip in done["clips"] if not clip["left_out"]]) >= 5
    assert done["clips"][0]["clip"].startswith("two_cities.wav#")
    assert VoiceStore(tmp_path).path("dickens").stat().st_size > 500_000
    assert done["voice"]["ceiling"] > 0.8
