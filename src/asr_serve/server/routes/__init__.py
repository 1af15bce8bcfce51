"""HTTP routes: transcriptions, speech, models, health."""
