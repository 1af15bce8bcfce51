"""Turn models, one file each: the end of what somebody said in, how likely they have finished out."""
