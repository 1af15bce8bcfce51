"""Quality measures of recognition and synthesis, one file per measure."""
