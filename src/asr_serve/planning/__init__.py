"""Capacity planning: how many replicas a load needs, by simulation with measured service times. No torch here."""
