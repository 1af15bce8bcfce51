"""Speech synthesis for the routes: voices, audio streams, sessions. No ASGI app here."""
