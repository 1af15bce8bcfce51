"""asr_serve_tools."""
