"""Governance of models: what a model must show before callers hear it, how it is rolled out, and who decided that."""
