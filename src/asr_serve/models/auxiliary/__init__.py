"""Models that tell who of a few speaks when, in a short stretch of audio. A model file each, see models/card."""
