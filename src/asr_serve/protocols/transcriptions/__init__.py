"""Recordings: a form to what is asked, a transcript to its answer. OpenAI's two routes, and FunASR's. No HTTP."""
