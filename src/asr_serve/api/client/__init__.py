"""Python client of live sessions: `StreamClient` (`stream`) sends and resumes, `SessionTranscript` (`transcript`)
accumulates events.

Raises errors.Unreachable and errors.Refused, and errors for wrong use.
"""
