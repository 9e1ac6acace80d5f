"""The kernels of layers with a state per sequence, on GPUs."""
