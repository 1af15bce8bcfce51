"""Riva's gRPC protocol, recognition and synthesis: messages to requests, results to messages, sans-I/O."""
