"""The order of test files: the longest first, so that no process ends long before the others."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LONGEST = (
    "cluster/test_ray_hosts.py",
    "engine/process/test_supervisor_handover.py",
    "engine/test_tensor_parallel.py",
    "server/test_server_lifecycle.py",
    "console/test_console.py",
    "console/test_words_and_speakers_page.py",
    "server/test_protocols_through_ingress.py",
    "cluster/test_ray_cluster.py",
    "clients_js/test_js_client.py",
    "engine/process/test_engine_process.py",
    "cluster/test_ray_autoscaling.py",
    "cluster/test_ray_roles.py",
    "pipelines/test_whisper_listen.py",
    "pipelines/test_listen_pipeline.py",
    "test_docs.py",
    "engine/remote/test_remote_encoding.py",
    "pipelines/test_pipeline_hotwords.py",
    "server/test_openai_transcriptions.py",
    "server/test_stream_python_client.py",
    "engine/streaming/test_stream_engine.py",
    "edge/test_telephone_calls.py",
    "server/test_webrtc_calls.py",
    "pipelines/test_sequential_long_form.py",
    "api/test_library_stream.py",
    "pipelines/test_tts_word_times.py",
    "pipelines/test_listen_seams.py",
    "console/test_console_webrtc.py",
    "edge/test_edge_on_a_wire.py",
    "pipelines/test_turn_detector.py",
    "server/test_encoder_decoder_namespaces.py",
    "engine/tts/test_tts_process.py",
    "funasr/test_funasr_programs.py",
    "engine/seq2seq/test_hotword_rescoring.py",
    "server/test_served_pipelines.py",
    "server/test_openai_realtime.py",
    "server/test_encoder_decoder_roles.py",
    "server/test_openapi_schema.py",
    "server/test_tracing.py",
    "models/test_kaldi_chain_real.py",
    "server/test_funasr_websocket.py",
    "console/test_speak_page.py",
    "models/test_tts_kokoro.py",
    "transfer/test_transports.py",
    "pipelines/test_transcribe_pipeline.py",
    "pipelines/test_incremental_listen.py",
    # `.ci/run` may still build what these want when the tests begin
    "engine/test_vllm_backend.py",
    "server/test_openai_plugins.py",
)
"""Files that take over 15 s on two cores. They are handed out in this order."""
RANKS = {TESTS / name: rank for rank, name in enumerate(LONGEST)}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: RANKS.get(item.path, len(RANKS)))
