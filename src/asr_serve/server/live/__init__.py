"""Live conversations over a socket: what is said in which turn, and what waits to be sent. No ASGI app here."""
