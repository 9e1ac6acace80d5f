"""The version of baton, for rooms that tell others what they run.

`baton.__version__` says the same; a test compares them. It is written there too, because setuptools
reads it without importing anything, and no room imports the front door. The metadata of an
installation is no source: it is there only under the name of the distribution.
"""

VERSION = "0.1.0"
