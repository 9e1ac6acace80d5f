"""One example of every message, each field set to something that is not its default."""

from baton.protocol.codec import (
    Codec,
    to_decode_codec,
    to_node_codec,
    to_prefill_codec,
    to_router_codec,
)
from baton.protocol.errors import Failure
from baton.protocol.ids import Epoch, Key, NodeId, RequestId
from baton.protocol.messages import (
    Accepted,
    Beat,
    Cancel,
    CancelDone,
    Declined,
    Decode,
    Done,
    End,
    Failed,
    FirstToken,
    FirstTokens,
    Hello,
    KVLayout,
    Load,
    Message,
    NodeInfo,
    Offered,
    PeerHello,
    Peers,
    Prefill,
    RankAddress,
    Ready,
    Refused,
    Renew,
    Renewed,
    Span,
    StageTimes,
    Starting,
    TokenEntry,
    Tokens,
    Withdrawn,
)
from baton.protocol.sampling import Sampling

KEY = Key(RequestId("r1-7"), 2, 1)
OTHER_KEY = Key(RequestId("r1-8"))
NODE, EPOCH = NodeId("decode-0"), Epoch("e0e1")
FAILURE = Failure("overloaded", "no room", True, 503, "max_tokens", 1.5)
SAMPLING = Sampling(42, 16, 2, 0.5, 40, 0.25, 0.125, (5, 6), True)
LAYOUT = KVLayout(16, 8192, "layout-1")
TIMES = StageTimes(0.5, 0.25, 0.125, 0.0625, 2.0, 4.0, 65536, 32)
FIRST = (FirstToken(7), FirstToken(9, "stop"))
INFO = NodeInfo(
    NODE, EPOCH, "decode", "tcp://127.0.0.1:5000", 100, LAYOUT,
    (RankAddress({"shm": b"\x00\x01"}),), "model-1", 4096, 640, (0, 2),
)  # fmt: skip

TO_NODE: tuple[Message, ...] = (
    Peers((INFO,)),
    Prefill(KEY, [1, 2, 300], 2, SAMPLING, 3, NODE),
    Decode(KEY, [1, 2, 300], 2, SAMPLING, 3, NODE),
    Cancel((KEY, OTHER_KEY), "attempt"),
    Refused(FAILURE),
)
TO_ROUTER: tuple[Message, ...] = (
    Hello(1, NODE, "decode", EPOCH),
    Starting(NODE, EPOCH, "weights", 3, 8),
    Ready(INFO),
    Beat(NODE, EPOCH, Load(1, 2, 3, 4, 5, 6), 0.5, 0.25, 0.125, True),
    Accepted(KEY, 48),
    FirstTokens(KEY, 33, FIRST, TIMES),
    Tokens([TokenEntry(KEY, 34, [10, 11], "length", TIMES), TokenEntry(OTHER_KEY, 5, [12])]),
    Failed(KEY, FAILURE),
    CancelDone((KEY, OTHER_KEY)),
)
TO_DECODE: tuple[Message, ...] = (
    PeerHello(1, NODE, EPOCH, "model-1", "layout-1"),
    Offered(KEY, 33, 3, 30.0),
    Span(KEY, 2, (8, 9), (1, 4), ((10, 11), (12, 13))),
    End(KEY, FIRST),
    Withdrawn(KEY, FAILURE),
    Renewed(KEY),
)
TO_PREFILL: tuple[Message, ...] = (
    PeerHello(1, NODE, EPOCH, "model-1", "layout-1"),
    Done(KEY),
    Renew((KEY, OTHER_KEY)),
    Declined(KEY, FAILURE),
)
EXAMPLES = {
    "ToNode": TO_NODE,
    "ToRouter": TO_ROUTER,
    "ToDecode": TO_DECODE,
    "ToPrefill": TO_PREFILL,
}


def codec_of(union: str) -> Codec[Message]:
    codecs = {
        "ToNode": to_node_codec(),
        "ToRouter": to_router_codec(),
        "ToDecode": to_decode_codec(),
        "ToPrefill": to_prefill_codec(),
    }
    return codecs[union]  # type: ignore[return-value]
