"""The records of a load: what was to be sent, and what came of it.

`plan/` makes `Planned` requests, the client fills one `Record` for each, figures and reports read
them. Times are seconds on one monotonic clock, from the start of the schedule: a warm-up request
lies before zero. Counts are tokens, never text.
"""

from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """What became of a request. Only `ANSWERED` can meet a bound; all but `STOPPED` are counted."""

    ANSWERED = "answered"
    UNREACHABLE = "unreachable"  # no connection, TLS refused, name unknown
    NO_SOCKET = "no_socket"  # the client's machine had no file or port left for a connection
    REFUSED = "refused"  # 429 or 503: the server said that it has no room
    CLIENT_ERROR = "client_error"  # any other 4xx
    SERVER_ERROR = "server_error"  # any other 5xx
    ERROR_IN_STREAM = "error_in_stream"  # an error event after status 200
    TRUNCATED = "truncated"  # the connection ended, or no [DONE] came
    NOT_STREAMED = "not_streamed"  # one JSON body where a stream was asked for
    MALFORMED = "malformed"  # an event that is no JSON, or not of this API
    WRONG_LENGTH = "wrong_length"  # other than the forced number of output tokens
    WRONG_USAGE = "wrong_usage"  # the reported usage contradicts the tokens that arrived
    WRONG_TOKENS = "wrong_tokens"  # greedy output differs from the single-request run
    TIMED_OUT = "timed_out"
    STOPPED = "stopped"  # the load was stopped before the answer ended, whatever it would have been


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Planned(msgspec.Struct, frozen=True):
    """A request that is to be sent. Exactly one of `prompt_ids`, `prompt` and `messages` is given.

    `at_s` is None in a closed loop, and for a later turn of a conversation: that is due `think_s`
    after the turn before it (same `conversation`, `turn` less by one) was answered.
    """

    index: int
    at_s: float | None
    output_tokens: int  # forced, and verified
    prompt_ids: tuple[int, ...] = ()
    prompt: str = ""
    messages: tuple[Message, ...] = ()
    conversation: int | None = None
    turn: int = 0
    think_s: float = 0.0
    warm_up: bool = False


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that carried tokens: when they came, and how many tokens."""

    at_s: float
    num_tokens: int


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """A named part of a request's time, in the order in which the parts follow each other."""

    name: str
    duration_s: float


class Record(msgspec.Struct, kw_only=True):
    """What became of one planned request."""

    index: int
    intended_s: float  # closed loop: the moment of sending
    sent_s: float
    first_byte_s: float | None = None  # of the body, token or not
    end_s: float  # last byte, or when the failure was seen
    outcome: Outcome
    detail: str = ""  # of a failure: one line, at most 200 characters
    status: int | None = None
    arrivals: list[Arrival] = msgspec.field(default_factory=list)
    prompt_tokens: int | None = None  # the server's usage
    output_tokens: int | None = None  # the server's usage; None if it gave none
    cached_tokens: int | None = None
    forced_tokens: int = 0
    token_ids: list[int] | None = None  # where the server returns them
    text: str | None = None  # kept for verification and conversations only
    stages: list[Stage] = msgspec.field(default_factory=list)
    conversation: int | None = None
    turn: int = 0
    warm_up: bool = False
    retry_after_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that arrived, by the arrivals."""
        return sum(arrival.num_tokens for arrival in self.arrivals)


class ClientProcess(msgspec.Struct, frozen=True):
    """What one client process cost."""

    pid: int
    cpu_s: float
    wall_s: float
    num_requests: int
    num_tokens: int
    max_loop_lag_s: float  # the longest its event loop was late for a 10 ms tick
    busiest_cpu: float = 0.0  # of a core, in the busiest 5 s; 0 if it ran for less


class LoadResult(msgspec.Struct):
    """A load that ran: `wall_s` from the start of the schedule to the last end."""

    records: list[Record]
    clients: list[ClientProcess]
    wall_s: float
    started_at: str  # UTC, ISO 8601
