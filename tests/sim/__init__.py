"""A whole cluster in one process, on a virtual clock: production's parts, unchanged.

Routers' cores, nodes' sockets, loops, schedulers, connectors and agents are the real ones. What
moves time, bytes and tokens is simulated: the event loop (`clock`), the channels (`network`), the
transports of KV blocks (`transports`) and the model (`executor`). A seed decides everything that
happens, so a seed is a bug report: `python -m tests.sim SEED -v`.
"""
