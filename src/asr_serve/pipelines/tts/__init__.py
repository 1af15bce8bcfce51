"""Speech synthesis: a session from text to samples, its sentences, text fed from a thread, output conversion."""
