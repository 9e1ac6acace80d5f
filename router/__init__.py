"""The router: it places requests on prefill and decode nodes and returns their tokens.

`core` drives the pure parts (`lifecycle`, `registry`, `policy`, `queue`) from one event
loop; `text_router` adds the tokenizer, and the folder `http` adds HTTP. The router never computes a
model, never starts a node, and must never import torch.
"""
