"""A voice out of recordings of somebody: what in them can be learnt from, and what a model learns of it."""
