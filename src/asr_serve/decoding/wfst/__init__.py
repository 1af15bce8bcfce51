"""Searches of decoding graphs (models/decoding_graph.py)."""
