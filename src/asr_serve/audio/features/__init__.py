"""Samples in, frames of features out: what models hear that do not hear samples."""
