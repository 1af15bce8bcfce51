"""Cloned voices: routes and the queue of cloning jobs."""
