"""What `asr-serve listen` is made of: where audio comes from, who hears it, what is shown."""
