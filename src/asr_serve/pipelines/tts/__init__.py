"""What a speech is made of: options, what of it comes, a sentence under way, its sound for the ear."""
