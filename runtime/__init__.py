"""What every process needs that is not a GPU: channels, clock, child processes, settings, log.

Used by every room above it. It imports `baton.protocol`, pyzmq, msgspec and pyyaml, and never
torch: a router and a benchmark client live on this room alone.
"""
