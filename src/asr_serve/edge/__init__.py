"""The edge: RTP from browsers and telephone networks, and voice activity, before an engine hears the audio."""
