"""Attention on the tensor cores of Hopper: of prompts, and of all tokens in one order of sums."""
