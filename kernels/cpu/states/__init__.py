"""The compiled kernels of layers that keep a state for each sequence, and their functions."""
