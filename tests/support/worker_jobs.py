"""A worker's process for tests: `python -m tests.support.worker_jobs DESCRIPTOR`."""

import ctypes
import os
import sys
import time
from typing import NoReturn

import msgspec

from baton.protocol.errors import RequestError
from baton.router.worker import serve

FOREVER_S = 3600.0
MIB = 1 << 20


def answer(job: str) -> object:
    match job:
        case "pid":
            return os.getpid()
        case "burn":
            burn()
        case "sleep":
            time.sleep(FOREVER_S)
        case "hoard":
            return len([bytes(MIB) for _ in range(1 << 20)])
        case "crash":
            return ctypes.string_at(0)
        case "refuse":
            raise RequestError("no", param="prompt")
        case "bug":
            raise ZeroDivisionError("a bug")
    return job


def burn() -> NoReturn:
    while True:
        pass


if __name__ == "__main__":
    serve(int(sys.argv[1]), msgspec.msgpack.Decoder(str), answer)
