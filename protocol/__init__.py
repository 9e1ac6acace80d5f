"""The vocabulary of baton: the messages between processes and the settings of all of them.

Every other room imports from here; this room imports no other room and no package but msgspec. It
holds data and its validation only: no sockets, no clocks, no tensors.
"""

VERSION = "0.1.0"  # of this release; pyproject.toml reads it too
