"""Kernels for NVIDIA GPUs, in Triton. `reference.py`, one folder up, defines their meaning."""
