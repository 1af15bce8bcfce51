"""JSON schemas of the OpenAPI document."""
