"""Edge: RTP from browsers and telephone networks to live sessions of a server. docs/edge.md shows a packet's way."""
