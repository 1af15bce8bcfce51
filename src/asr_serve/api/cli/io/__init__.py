"""Input and output of commands: microphone and other audio sources, captions, loudspeaker, output files."""
