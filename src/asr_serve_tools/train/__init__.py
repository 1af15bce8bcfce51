"""Training of what nobody publishes: each file is a command, `python -m asr_serve_tools.train.NAME --help`."""
