"""Live sessions outside the server: records, encryption, Redis, and the writer behind the sessions."""
