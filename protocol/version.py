"""The version of baton, for rooms that tell others what they run.

`baton.__version__` says the same; a test compares them. It stands there too, because setuptools
reads it without importing anything, and no room imports the front door. The metadata of an
installation cannot serve as the source: it exists only under the name of the distribution.
"""

VERSION = "0.1.0"
