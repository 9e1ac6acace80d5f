"""Every way in which a request or a process can fail, in one tree.

    BatonError(code, retryable, http_status)
    ├── RequestError       4xx: the request is at fault; `param` names the field
    ├── Overloaded         429/503/504: the client may try again later, here or elsewhere
    ├── TransferError      KV blocks could not be moved
    ├── NodeError          an engine process is gone, broken or unreachable
    ├── Cancelled          the client or a newer attempt ended it
    ├── ConfigError        a setting cannot work; the message says what to do
    └── InvariantBroken    a bug in baton: the process must end

A process raises these, sends them to other processes as `Failure`, and turns them into
OpenAI-shaped JSON at the HTTP edge.
"""

import msgspec

from baton.protocol.ids import HttpStatus


class Failure(msgspec.Struct, frozen=True):
    code: str
    message: str
    retryable: bool = False
    http_status: HttpStatus = 500
    param: str | None = None
    retry_after_s: float | None = None


class BatonError(Exception):
    """Root of the tree. `code` is stable and machine-readable; `message` is for a person."""

    code = "internal_error"
    retryable = False
    http_status = 500

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        http_status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.param = param
        self.http_status = http_status or type(self).http_status
        self.retry_after_s = retry_after_s

    def to_failure(self) -> Failure:
        return Failure(
            self.code,
            self.message,
            self.retryable,
            self.http_status,
            self.param,
            self.retry_after_s,
        )


class RequestError(BatonError):
    code = "invalid_request"
    http_status = 400


class Overloaded(BatonError):
    code = "overloaded"
    retryable = True
    http_status = 503


class TransferError(BatonError):
    code = "transfer_failed"
    retryable = True
    http_status = 502


class NodeError(BatonError):
    code = "node_lost"
    retryable = True
    http_status = 502


class Cancelled(BatonError):
    code = "cancelled"
    http_status = 499


class ConfigError(BatonError):
    code = "bad_config"


class InvariantBroken(BatonError):
    code = "invariant_broken"


def from_failure(failure: Failure) -> BatonError:
    kind: type[BatonError] = NodeError if failure.retryable else BatonError
    if failure.code == Cancelled.code:
        kind = Cancelled
    elif 400 <= failure.http_status < 500 and failure.http_status != 429:
        kind = RequestError
    elif failure.http_status in (429, 503, 504):
        kind = Overloaded
    elif failure.code == TransferError.code:
        kind = TransferError
    return kind(
        failure.message,
        code=failure.code,
        param=failure.param,
        http_status=failure.http_status,
        retry_after_s=failure.retry_after_s,
    )
