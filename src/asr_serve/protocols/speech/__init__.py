"""What clients send to be spoken, and what they get. No HTTP."""
