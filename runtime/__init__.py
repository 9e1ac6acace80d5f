"""What every process needs that is not a GPU: channels, child processes, settings, metrics, log.

It imports `baton.protocol` and never torch, knows nothing of requests, and decides nothing about
them: a router and a benchmark client need no other room below them.
"""
