"""Protocols of sherpa-onnx's WebSocket servers, streaming and offline."""
