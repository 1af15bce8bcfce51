"""Feature extraction: samples to frames of filter-bank energies or cepstra."""
