"""What every process needs that is not a GPU: channels, clock, child processes, settings, log.

Every room above it uses it. It imports `baton.protocol`, pyzmq, msgspec and pyyaml, and never
torch: a router and a benchmark client need no other room below them.
"""
