"""`baton doctor` finds problems of this machine, of the hosts of a cluster, and between them.

Probers collect facts, rules turn facts into findings, and nothing here serves a request. The path
between two hosts is measured with `kv_transfer`'s own agents and transports, over pools of its own,
so a cluster that serves loses only a second of its network and none of its memory.
"""
