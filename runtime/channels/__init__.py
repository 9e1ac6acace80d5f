"""Typed, ordered, non-blocking channels between processes: one `Listener`, many `Dialer`s.

Router and nodes talk through these, and so do prefill and decode nodes. A channel delivers every
message of a session once and in order, or reports the end of the session: a lost connection, a gap,
a peer that restarted and a queue that is full are all the same event, and nothing is resent. A
listener notices a dead dialer and a dialer a dead listener within 3.5 s (at once if the process
ended).

Watch `fileno()` for reading (asyncio's `add_reader`, or register the channel itself with a
`zmq.Poller`) and, whenever it fires, call `receive` until it returns None. The descriptor signals
changes, so stopping earlier may leave messages unnoticed; sending needs no care. Each channel
belongs to one thread.
"""
