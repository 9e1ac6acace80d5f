"""The records of a load: the planned requests, and their outcomes.

Times are seconds on one monotonic clock, from the start of the schedule: a warm-up request lies
before zero. Counts are tokens, never text.
"""

from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """The outcome of a request. Only `ANSWERED` can meet a bound; all but `STOPPED` count."""

    ANSWERED = "answered"
    UNREACHABLE = "unreachable"  # no connection, TLS refused, name unknown
    # The client's machine had no file or port left for a connection.
    NO_SOCKET = "no_socket"
    REFUSED = "refused"  # 429 or 503: the server has no room
    CLIENT_ERROR = "client_error"  # any other 4xx
    SERVER_ERROR = "server_error"  # any other 5xx
    ERROR_IN_STREAM = "error_in_stream"  # an error event after status 200
    TRUNCATED = "truncated"  # the connection ended, or no [DONE] came
    NOT_STREAMED = "not_streamed"  # one JSON body where a stream was asked for
    MALFORMED = "malformed"  # an event is not JSON, or not of this API
    WRONG_LENGTH = "wrong_length"  # the number of output tokens is not the forced one
    # The reported usage contradicts the tokens that arrived.
    WRONG_USAGE = "wrong_usage"
    TIMED_OUT = "timed_out"
    STOPPED = "stopped"  # the load was stopped before the response ended


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Planned(msgspec.Struct, frozen=True):
    """A request that is to be sent, with one of `prompt_ids`, `prompt` and `messages`."""

    index: int
    at_s: float | None  # None in a closed loop
    output_tokens: int  # forced, and verified
    prompt_ids: tuple[int, ...] = ()
    prompt: str = ""
    messages: tuple[Message, ...] = ()
    warm_up: bool = False


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """The time at which bytes with tokens came, and the number of those tokens, at least one."""

    at_s: float
    num_tokens: int


class Record(msgspec.Struct, kw_only=True):
    """The outcome, times and counts of one planned request."""

    index: int
    intended_s: float  # in a closed loop, the moment of sending
    sent_s: float
    first_byte_s: float | None = None  # the body's first byte, token or not
    end_s: float  # the time of the last byte, or of the failure
    outcome: Outcome
    detail: str = ""  # one line about a failure, at most 200 characters
    status: int | None = None
    arrivals: list[Arrival] = msgspec.field(default_factory=list)
    prompt_tokens: int | None = None  # the server's usage
    output_tokens: int | None = None  # the server's usage; None if it gave none
    cached_tokens: int | None = None
    forced_tokens: int = 0
    token_ids: list[int] | None = None  # where the server returns them
    warm_up: bool = False

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that arrived, by the arrivals."""
        return sum(arrival.num_tokens for arrival in self.arrivals)


class ClientProcess(msgspec.Struct, frozen=True):
    """The cost of one client process."""

    pid: int
    cpu_s: float
    wall_s: float
    num_requests: int
    num_tokens: int


class LoadResult(msgspec.Struct):
    """A load that ran; `wall_s` is the time from the start of the schedule to the last end."""

    records: list[Record]
    clients: list[ClientProcess]
    wall_s: float
    started_at: str  # UTC, ISO 8601
