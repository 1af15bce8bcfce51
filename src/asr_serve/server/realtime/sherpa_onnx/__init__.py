"""Clients of sherpa-onnx's WebSocket servers, at `/`: their first message tells them from FunASR's."""
