"""Python API: `Model` (library), streams of results, speech. `api/client` is the client of a server, `api/cli`
the command line."""
