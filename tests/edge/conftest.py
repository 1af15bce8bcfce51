"""Fixtures of the edge tests: the servers of the server tests, and speech with its words."""

from heard_speech import expected, speech  # noqa: F401
from running_server import (  # noqa: F401
    cities,
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
