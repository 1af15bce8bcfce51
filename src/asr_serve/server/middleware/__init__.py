"""ASGI middleware: request context, admission, errors."""
