"""The vocabulary of baton: what travels between processes and what configures them.

Every other room imports from here; this room imports nothing of baton and nothing but msgspec.
It holds data and its validation only: no sockets, no clocks, no tensors.
"""
