"""The edge of the server: what is done with callers' audio before an engine hears it."""
