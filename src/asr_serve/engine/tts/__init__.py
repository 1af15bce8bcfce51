"""Speech synthesis for many clients at once: whole sentences, or chunk by chunk."""
