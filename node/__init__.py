"""What a prefill node and a decode node share, without torch.

The files here are the node as a process: its loop, its channels to routers, its heartbeats and its
HTTP. `scheduling` holds the state of requests and blocks on the host. Steps are computed behind
the interface in `executor.py`, so this room never imports a model. No file may know whether the
node prefills or decodes.
"""
