"""The version of baton, for rooms that tell others which version they run.

A test compares it with `baton.__version__`, which setuptools reads without importing anything and
which no room can import. The metadata of an installation cannot be the source, because it exists
only under the name of the distribution.
"""

VERSION = "0.1.0"
