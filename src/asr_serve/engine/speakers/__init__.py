"""Who speaks: models beside what recognises."""
