"""What voices that say whole sentences share."""
