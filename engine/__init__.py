"""What a prefill node and a decode node share, in three parts.

`process` is the node as a process: its loop, connections, heartbeats and HTTP. `scheduling` is the
host-side state of requests and blocks. `compute` loads a model and runs steps; only it may import
torch. No part may know whether the node prefills or decodes.
"""
