"""How good the answers are, measured: one file per measure."""
