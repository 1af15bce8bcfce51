"""What vocoders are made of."""
