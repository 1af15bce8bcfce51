"""The order of test files: the longest first, so that no process ends long before the others."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LONGEST = (
    "console/test_cloning_page.py",
    "cluster/test_ray_roles.py",
    "engine/process/test_engine_process.py",
    "cluster/test_ray_cluster.py",
    "engine/process/test_supervisor_handover.py",
    "engine/test_tensor_parallel.py",
    "console/test_console.py",
    "console/test_page_budgets.py",
    "clients_js/test_js_client.py",
    "server/test_server_lifecycle.py",
    "console/test_batches_page.py",
    "console/test_words_and_speakers_page.py",
    "server/test_openai_realtime.py",
    "server/test_spoken_language.py",
    "cluster/test_ray_autoscaling.py",
    "cluster/test_ray_hosts.py",
    "edge/test_edge_service.py",
    "pipelines/test_whisper_listen.py",
    "engine/replicas/test_replicated_backend.py",
    "engine/remote/test_remote_encoding.py",
    "console/test_history_page.py",
    "server/test_protocols_through_ingress.py",
    "console/test_compare_page.py",
    "pipelines/test_listen_pipeline.py",
    "test_docs.py",
    "pipelines/test_turn_detector.py",
    "server/test_stream_python_client.py",
    "engine/streaming/test_chunked_equals_sequential.py",
    "server/test_stream_resume.py",
    "console/test_key_page.py",
    "engine/seq2seq/test_encoder_cache.py",
    "server/test_prompts_and_hotwords.py",
    "server/test_funasr_websocket.py",
    "api/cli/test_cli_listen.py",
    "server/test_stored_sessions.py",
    "server/test_served_pipelines.py",
    "server/test_encoder_decoder_roles.py",
    "engine/streaming/test_stream_engine.py",
    "api/test_library_stream.py",
    "models/test_moonshine_parity.py",
    "server/test_protocols_over_replicas.py",
    "api/cli/test_cli_batch_resume.py",
    "cloning/test_clone.py",
    "engine/tts/test_tts_process.py",
    "server/test_stream_lifecycle.py",
    "kernels/test_triton_kernels.py",
    "server/test_openapi_schema.py",
    "server/test_riva.py",
    "console/test_speak_page.py",
    "transfer/test_transports.py",
    "pipelines/test_transcribe_pipeline.py",
    "server/test_stream_transports.py",
    "funasr/test_funasr_programs.py",
    "pipelines/test_streaming_recognizer.py",
    "server/test_encoder_decoder_namespaces.py",
    "engine/test_turn_runner.py",
    "engine/streaming/test_incremental_encoder.py",
    "bench/test_live_load.py",
    "server/test_policy_rollout.py",
    "engine/streaming/test_real_streaming.py",
    "console/test_console_webrtc.py",
    "pipelines/test_decoding_graph.py",
    "tools/train/test_train_vocoder.py",
    "bench/test_batch_kills.py",
    "kernels/test_wfst_kernel.py",
    "server/test_openai_transcriptions.py",
    "pipelines/test_pipeline_diarization.py",
    "api/cli/test_transcribe_real.py",
    "deploy/test_terraform.py",
    "server/test_speech_chunked.py",
    "text/normalization/test_inverse_meaning.py",
    "kernels/test_streaming_kernels.py",
    "pipelines/test_incremental_listen.py",
    "edge/test_telephone_calls.py",
    "edge/test_edge_senders.py",
    "models/test_tts_kokoro.py",
    "pipelines/test_pipeline_hotwords.py",
    # `.ci/run` may still build what these want when the tests begin
    "engine/test_vllm_backend.py",
    "server/test_openai_plugins.py",
)
"""Files that take over 20 s on two cores. They are handed out in this order."""
RANKS = {TESTS / name: rank for rank, name in enumerate(LONGEST)}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: RANKS.get(item.path, len(RANKS)))
