"""The identity of a dialer: its name, and a nonce for each of its connections.

A dialer connects under a new identity every time, so a listener never takes one connection for
another. The listener's owner reads the name.
"""

import secrets

SEPARATOR = b"/"
# The name of a command that a person runs. No node has this name, because node ids have no spaces.
OPERATOR = b"an operator"
NONCE_BYTES = 8


def new_identity(name: bytes) -> bytes:
    """Return an identity that was never used before."""
    return name + SEPARATOR + secrets.token_hex(NONCE_BYTES).encode()


def name_of(identity: bytes) -> bytes:
    """Return the name in a dialer's `identity`."""
    return identity.rpartition(SEPARATOR)[0]
