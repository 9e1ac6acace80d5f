"""Typed, ordered, non-blocking channels between processes: one `Listener`, many `Dialer`s.

A channel delivers every message of a session once and in order, or reports the end of the session:
a lost connection, a gap, a peer that restarted and a full queue are all the same event, and nothing
is resent. Either side notices a dead peer within 3.5 s (at once if the process ended), or within
the time that `Channels` is given. A dialer notices within seconds that the listener does not have
its session, or not all of it.

Watch `fileno()` for reading (asyncio's `add_reader`, or register the channel itself with a
`zmq.Poller`) and, whenever it fires, call `receive` until it returns None: the descriptor signals
changes, so stopping earlier may leave messages unnoticed. Sending needs no care. Each channel
belongs to one thread. Channels never interpret a message.
"""
