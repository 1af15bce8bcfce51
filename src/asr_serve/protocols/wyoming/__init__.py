"""Wyoming, the protocol of Home Assistant's voice services: framing and events, sans-I/O."""
