"""OpenAI's API: transcription and speech requests, responses, server-sent events and Realtime events."""
