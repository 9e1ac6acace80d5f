"""Kernels for CPUs, compiled with numba. `reference.py`, one folder up, defines their meaning."""
