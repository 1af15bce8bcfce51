"""Evaluations of recognizers: what was measured, in one SQLite file, and the figures that follow from it."""
