"""What every process needs that is not a GPU: channels, clock, children, settings, log, metrics.

Used by every room above it. It imports `baton.protocol`, pyzmq, msgspec, prometheus_client and
pyyaml, and never torch: a router and a benchmark client live on this room alone.
"""
