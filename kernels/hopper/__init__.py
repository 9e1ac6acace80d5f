"""Kernels for the tensor cores of compute capability 9.0, in CUDA C++ and Gluon."""
