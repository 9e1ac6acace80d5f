"""Moving KV blocks from a prefill pool into a decode pool.

`NodeConnector` (per node, on the host) knows requests; `Transport` (per rank) moves bytes; between
them a `TransferAgent` (a thread per rank) posts reads and polls them. The receiver copies, so no
node ever writes into another node's pool. This room imports nothing of nodes or models.
"""
