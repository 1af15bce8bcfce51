"""moonshine."""
