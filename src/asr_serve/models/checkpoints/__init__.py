"""Checkpoints: finding, fetching, verifying and converting weights; readers of ONNX and TensorFlow Lite graphs."""
