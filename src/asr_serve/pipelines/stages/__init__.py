"""Pipelines of stages that a TOML file names: recognizers, rescoring, filters, written forms."""
