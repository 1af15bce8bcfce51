"""Engines that encode for others: what is said (said, meeting), who asks (asking, peer), who encodes (worker)."""
