"""Live recognition sockets: lifecycle, outgoing messages, listener; one package for each protocol."""
