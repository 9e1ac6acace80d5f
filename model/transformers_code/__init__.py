"""Decoders that transformers' own code computes, with baton's paged attention in it."""
