"""The engine behind HTTP, as clients already speak it."""
