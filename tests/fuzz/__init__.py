"""A fuzzer of a router's HTTP side: hostile clients attack a real process beside a polite one.

`python -m tests.fuzz SEED [--minutes M]` runs the attacks of a seed.
"""
