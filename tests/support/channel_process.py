"""One end of a channel as a process: `python -m tests.support.channel_process ROLE ENDPOINT`.

`dial` says its number whenever a session begins, `listen` reads nothing, and `flood` is a bare
socket that says more than any queue holds.
"""

import select
import sys
import time

import zmq

from baton.protocol.codec import to_node_codec, to_router_codec
from baton.runtime.channels.dialer import Dialer, Disconnected
from baton.runtime.channels.listener import Listener
from tests.support.channel_ends import frame, note

FLOOD = 20_000


def dial(endpoint: str) -> None:
    dialer = Dialer(endpoint, b"d0", to_router_codec(), to_node_codec(), zmq.Context())
    number = 0
    dialer.send(note(number))
    while True:
        select.select([dialer.fileno()], [], [])
        while (message := dialer.receive()) is not None:
            if isinstance(message, Disconnected):
                number += 1
                dialer.send(note(number))


def listen(endpoint: str) -> None:
    listener = Listener(endpoint, to_node_codec(), to_router_codec(), zmq.Context())
    time.sleep(600)
    listener.close()


def flood(endpoint: str) -> None:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(endpoint)
    payload = to_router_codec().encode(note(1, 200))
    for number in range(FLOOD):
        socket.send(frame(7, number, payload))
    print("sent", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    {"dial": dial, "listen": listen, "flood": flood}[sys.argv[1]](sys.argv[2])
