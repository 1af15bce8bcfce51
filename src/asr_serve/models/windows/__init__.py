"""Encoders whose frames see a window of what is around them."""
