"""Calls over WebRTC: OpenAI Realtime's `/v1/realtime/calls`, and WHIP's `/v1/whip`."""
