"""The soak: streams with known outputs through a cluster whose processes are killed and frozen.

`python -m tools.soak` runs it, or `make soak`.
"""
