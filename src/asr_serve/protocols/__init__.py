"""What clients send and what they get back, as data: no HTTP here."""
