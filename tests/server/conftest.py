"""Fixtures of the server tests. Helpers are in running_server.py, because several folders have a conftest."""

from running_server import (  # noqa: F401
    beckett,
    cities,
    hears_speakers,
    ingress_host,
    paid_wav,
    parts,
    serve,
    serve_voice,
    server,
    shared_server,
    shared_speaker,
    speaker,
    voice_parts,
    wav,
)
