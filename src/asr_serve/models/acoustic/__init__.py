"""The acoustic model of a voice: phonemes to frames of a spectrogram. models/tts/fastpitch says it, train/voice
teaches it: the same lines run for both."""
