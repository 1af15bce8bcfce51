"""What the server tells of itself as it goes: logs and traces."""
