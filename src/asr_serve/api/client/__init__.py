"""A live session on a server, from Python: `stream.Stream` sends and resumes, `transcript.Transcript` adds up.

Raises errors.Unreachable and errors.Refused, besides what is the caller's own.
"""
