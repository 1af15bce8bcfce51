"""Auxiliary models, one file each: voice activity, end of turn, speaker embedding, speaker segmentation."""
