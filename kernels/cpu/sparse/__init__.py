"""The compiled kernels of sparse attention, which choose a query's keys, and their functions."""
