"""Inverse text normalisation: numbers, dates, money as one writes them, from words as they were said."""
