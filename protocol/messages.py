"""Messages between routers and nodes, and between prefill and decode nodes.

Each channel and direction has one tagged union with one typed decoder (`codec`). New fields have
defaults. No message carries the time of another host's clock: deadlines travel as the seconds that
remain. A position is the absolute index of a token in its sequence, prompt included.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.protocol.adapters import MAX_ENTRIES, MAX_NAME, MAX_PATH, AdapterEntry
from baton.protocol.blocks import HASH_BYTES, KEY_BYTES
from baton.protocol.errors import Failure
from baton.protocol.ids import (
    MAX_KEYS,
    BlockCount,
    BlockId,
    Checksum,
    Count,
    Epoch,
    Generation,
    Key,
    NodeId,
    NumBytes,
    Total,
)
from baton.protocol.pooling import ModelTasks
from baton.protocol.sampling import Sampling

PROTOCOL_VERSION = 1

Role = Literal["prefill", "decode"]
TierName = Literal["memory", "folder"]  # below a node's KV pool
FinishReason = Literal["stop", "length", "repetition"]
# The failure of a node that would have to compute more than its router expected.
NOT_CACHED = "not_cached"
# The features of nodes that lend cached blocks to those that compute equal bits, or to any.
PREFIX_READS = "prefix_reads"
ANY_PREFIX_READS = "any_prefix_reads"
# Of nodes that take `Prefetch` and let others read what they leave.
PREFETCHES = "prefetches"


PackedHashes = Annotated[bytes, Meta(max_length=MAX_KEYS * HASH_BYTES)]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The root of all messages. A message's tag is its class name."""


class LayerGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers that store the same of a token: `planes` rows of `width` numbers for each KV head.

    A `full` layer stores keys and values, a `latent` one a row that is both, for all heads. In
    `full-fp8` layers, numbers are e4m3 bytes, and the rows of a block are followed by a byte each,
    their exponents.

    An `index` layer stores one key, by which layers choose the tokens that a query sees.

    A `state` layer stores nothing of a token, but a matrix of `planes` rows of `width` numbers for
    each of `kv_heads` heads of a sequence.
    """

    kind: str
    num_layers: Count
    kv_heads: Count  # on all ranks together
    planes: Count
    width: Count


class KVLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """The layout of one KV block of one rank's pool. Two pools must agree on it to exchange blocks.

    A rank's pool is one tensor `[num_blocks, kv_heads, num_layers, 2, block_size, head_dim]`, so a
    block is one contiguous region for all layers, and so is any range of its heads. `groups` says
    what the layers store, one group after the other, and the fingerprint covers it.
    """

    block_size: Count  # tokens
    block_bytes: NumBytes  # on one rank, so it depends on the number of ranks
    fingerprint: str  # covers everything that two pools must share
    kv_heads: Count = 0  # of the model, on all ranks together; 0 means unknown
    groups: tuple[LayerGroup, ...] = ()  # empty means unknown
    # Blocks that hold the state of one sequence, beside those of its tokens, if the model has any.
    state_blocks: Count = 0


class RankAddress(msgspec.Struct, frozen=True):
    """How peers can read one rank's pool: each transport's name and its opaque metadata."""

    metadata: dict[str, bytes]


class StepLimits(msgspec.Struct, frozen=True, array_like=True):
    """The most that one step takes, so a router knows how much to give at once. 0 means unknown."""

    num_slots: Count = 0  # places for sequences
    num_tokens: Count = 0  # prompt tokens


class NodeFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node computes with, for people and metrics, and how much one of its steps takes in."""

    dtype: str = ""  # of weights and KV blocks
    device: str = ""
    features: tuple[str, ...] = ()  # the features that are switched on
    model_name: str = ""
    step: StepLimits = StepLimits()
    lora_modules: tuple[str, ...] = ()  # the names of the adapters
    tasks: ModelTasks = ModelTasks()


class NodeInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a ready node publishes about itself. The router passes it on to its peers."""

    node_id: NodeId
    epoch: Epoch
    role: Role
    control_endpoint: str  # where peers dial; empty when the node takes no peers
    num_blocks: BlockCount
    layout: KVLayout
    ranks: tuple[RankAddress, ...]
    model: str  # fingerprint: configuration and weights
    max_model_len: Count
    vocab_size: Count
    eos_token_ids: tuple[Count, ...] = ()
    batch_invariant: bool = False  # a token's bits depend on its own sequence alone
    compute: str = ""  # equal for nodes that compute the same bits
    # The ways to read the pool. Two nodes with an equal text share that way. Empty means unknown.
    reaches: tuple[str, ...] = ()
    facts: NodeFacts = NodeFacts()


# --- router to node ---------------------------------------------------------------------------


class Peers(Message, frozen=True):
    """All ready nodes of the other role, sent each time the set changes."""

    nodes: tuple[NodeInfo, ...]
    # Why this router gives the receiver no work; empty if it does.
    out_of_service: str = ""


class Prefill(Message, frozen=True):
    """Asks a node to compute `token_ids` and to sample the first token of each choice.

    On a resume, `token_ids` include the tokens that were already streamed, and `num_prompt_tokens`
    says where the prompt ended. `decode_node` is None when no node takes the blocks (max_tokens =
    1). If `sampling.pooling` is set, no token is sampled, and `Pooled` is the reply.

    `prefix_node` probably has blocks of its first tokens, which may be read instead of computed.
    """

    key: Key
    token_ids: list[Count]
    num_prompt_tokens: Count
    sampling: Sampling
    num_choices: Count = 1
    decode_node: NodeId | None = None
    prefix_node: NodeId | None = None


class Decode(Message, frozen=True):
    """Asks a node to generate from where the `Prefill` of the same key ends.

    Without a `prefill_node` the node computes the prompt itself. If more than `max_uncached_tokens`
    of the prompt are not cached, the node refuses with `NOT_CACHED`.

    `prompt_compute` is the `compute` of the `prefill_node` if both nodes promise bits, and it
    promises others: then the receiver tells blocks with those apart from its own.
    """

    key: Key
    token_ids: list[Count]
    num_prompt_tokens: Count
    sampling: Sampling
    num_choices: Count = 1
    prefill_node: NodeId | None = None
    max_uncached_tokens: Count | None = None  # None means no limit
    prompt_compute: str = ""


class Cancel(Message, frozen=True):
    """Asks a node to end these sequences. `CancelDone` answers for all, unknown keys included."""

    keys: tuple[Key, ...]
    reason: str = "client"


class Refused(Message, frozen=True):
    """Tells a node that its Hello or Ready cannot be accepted.

    A node that is still starting exits non-zero with the message; a node that is ready asks again.
    """

    failure: Failure


class Drain(Message, frozen=True):
    """Asks a node to take no more requests, to finish in `node.shutdown_timeout_s`, and to end."""


class WatchCache(Message, frozen=True):
    """Asks a node which blocks its prefix cache holds: all of them now, and then every change."""


class ResetPrefixCache(Message, frozen=True):
    """Asks a node to forget its prefix cache. Requests that follow find none of its blocks."""


class Profile(Message, frozen=True):
    """Asks a node to record its steps from now on, or to end that and to write its traces."""

    # Its files' names begin with this name. An empty one ends the profile.
    name: Annotated[str, Meta(max_length=64, pattern=r"^[\w-]*$")] = ""


AdapterName = Annotated[str, Meta(max_length=MAX_NAME)]
AdapterPath = Annotated[str, Meta(max_length=MAX_PATH)]
AdapterEntries = Annotated[tuple[AdapterEntry, ...], Meta(max_length=MAX_ENTRIES)]


class LoadAdapter(Message, frozen=True):
    """Asks a node to load a LoRA adapter that is in no list yet. `AdapterLoaded` answers."""

    name: AdapterName
    path: AdapterPath


class Prefetch(Message, frozen=True):
    """Asks a node to read cached blocks of another node before a prompt needs them.

    `Prefetched` answers. The blocks take the places of cached ones that have been idle for longer.
    """

    key: Key
    source: NodeId
    hashes: PackedHashes
    idle_s: float  # for which all of them have been idle at most
    timeout_s: float


class HandedOver(Message, frozen=True):
    """The reply to `HandOver`: the nodes that were asked to read these blocks have done so."""

    number: Count


class ListAdapters(Message, frozen=True):
    """Tells a node the last change of each adapter of run time. `AdaptersHeld` answers.

    The node loads those that it lacks.
    """

    entries: AdapterEntries


class DrainState(Message, frozen=True):
    """The reply to `DrainNode`, for the operator's command."""

    node_id: NodeId
    is_known: bool = False  # the node is connected to this router
    num_running: Count = 0  # sequences that the node has yet to finish
    problem: str = ""  # why the node is not drained


ToNode = (
    Peers
    | Prefill
    | Decode
    | Cancel
    | Refused
    | Drain
    | DrainState
    | WatchCache
    | ResetPrefixCache
    | Profile
    | LoadAdapter
    | ListAdapters
    | Prefetch
    | HandedOver
)


# --- node to router ---------------------------------------------------------------------------


class Hello(Message, frozen=True):
    version: Count
    node_id: NodeId
    role: Role
    epoch: Epoch


class Starting(Message, frozen=True):
    """Start-up progress, which a node sends at least once a second while it starts."""

    node_id: NodeId
    epoch: Epoch
    phase: str
    done: Count
    total: Count


class Ready(Message, frozen=True):
    info: NodeInfo


class Load(msgspec.Struct, frozen=True, array_like=True):
    """The work and the blocks of a node, for routing and for the line of statistics."""

    num_running: Count = 0
    num_waiting: Count = 0
    free_blocks: Count = 0  # evictable cached blocks included
    total_blocks: Count = 0
    cached_blocks: Count = 0
    quarantined_blocks: Count = 0


class Totals(msgspec.Struct, frozen=True, array_like=True):
    """What a node has counted since it started, for the metrics."""

    prompt_tokens: Total = 0  # prompt tokens that the node computed
    output_tokens: Total = 0  # tokens that the node sampled
    steps: Total = 0
    steps_s: float = 0.0
    prefix_queried_tokens: Total = 0
    prefix_hit_tokens: Total = 0
    preemptions: Total = 0
    leases_expired: Total = 0
    reads: Total = 0  # reads of KV blocks
    read_bytes: Total = 0
    reads_s: float = 0.0  # the sum over all reads, each from its post to its end
    failed_reads: Total = 0
    corrupt_reads: Total = 0  # reads in which a block had other bytes than were sent
    spec_decode_draft_tokens: Total = 0  # guessed by speculative decoding
    spec_decode_accepted_tokens: Total = 0  # guessed right
    # Of prompts, read from other nodes instead of computed.
    prefix_read_tokens: Total = 0
    failed_prefix_reads: Total = 0  # whose prompts were computed
    memory_hit_tokens: Total = 0  # of prompts, read from a tier of the node
    folder_hit_tokens: Total = 0
    # Read from other nodes without a prompt that needs them.
    prefetched_tokens: Total = 0


class Heartbeat(Message, frozen=True):
    """A node's state. A thread of its own sends it every second, however long a step takes."""

    node_id: NodeId
    epoch: Epoch
    load: Load
    step_age_s: float = 0.0
    predicted_s: float = 0.0
    # Since the engine loop, which never computes, last had nothing left to do.
    loop_age_s: float = 0.0
    # The node takes no new requests and ends when it has none.
    is_draining: bool = False
    totals: Totals = Totals()
    unreachable: tuple[NodeId, ...] = ()  # decode nodes to which its channel broke


PackedKeys = Annotated[bytes, Meta(max_length=MAX_KEYS * KEY_BYTES)]


class CacheChanges(Message, frozen=True):
    """The blocks that the prefix cache, or a tier below it, has added and removed, as packed keys.

    Number 0 starts over: the router forgets what it knew of this node's cache or tier. Later
    messages of each are numbered consecutively. A router that misses one asks for everything with
    another `WatchCache`.
    """

    number: Count
    added: PackedKeys = b""
    removed: PackedKeys = b""
    tier: TierName | None = None


class Accepted(Message, frozen=True):
    """Decode has reserved every block that the handoff, or computing the prompt itself, needs."""

    key: Key
    num_cached_tokens: Count = 0


class StageTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The durations of an attempt's stages at a node, each on the clock that measured it."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    exposed_s: float = 0.0  # transfer time after the last chunk was announced
    decode_queue_s: float = 0.0
    first_step_s: float = 0.0
    transfer_bytes: NumBytes = 0
    # Where the prompt was computed; decode repeats what prefill said.
    num_cached_tokens: Count = 0
    # Of those, tokens whose blocks a tier or another node had.
    num_read_tokens: Count = 0
    prefix_read_s: float = 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log probability of a token, its rank (1 is the likeliest), and the likeliest tokens."""

    logprob: float
    rank: Count
    top: tuple[tuple[Count, float], ...] = ()


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """The first token of one choice, and whether it already ends the sequence."""

    token_id: Count
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None


class FirstTokens(Message, frozen=True):
    """The first tokens after a prompt, all at `position`. Entry i is of choice `key.choice + i`."""

    key: Key
    position: Count
    tokens: tuple[FirstToken, ...]
    times: StageTimes = StageTimes()


class PromptLogprobs(Message, frozen=True):
    """The log probabilities of a prompt's next tokens, beginning with its second one.

    A row for each token has pairs of an int32 and an fp32, little-endian: the token's rank and log
    probability, then ids and log probabilities of as many of the likeliest tokens as are wanted. A
    node that computes the prompt sends them chunk by chunk, before its first tokens.
    """

    key: Key
    rows: bytes


class Pooled(Message, frozen=True):
    """What a node has made of a whole prompt: fp32 numbers, little-endian. It ends the attempt."""

    key: Key
    numbers: bytes
    times: StageTimes = StageTimes()


class TokenEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one sequence. The first of them is at the absolute position `position`."""

    key: Key
    position: Count
    token_ids: list[Count]
    finish_reason: FinishReason | None = None
    times: StageTimes | None = None  # set in a sequence's first entry
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, if they were asked for
    num_draft_tokens: Count = 0  # that were guessed for these tokens
    num_accepted_tokens: Count = 0  # of them, those that were right


class Tokens(Message, frozen=True):
    """All new tokens of one decode step for one router."""

    entries: list[TokenEntry]


class Failed(Message, frozen=True):
    """The node has ended its part of the attempt; no more messages of it follow."""

    key: Key
    failure: Failure


class InProgress(Message, frozen=True):
    """These sequences wait for a step of this node or take part in its steps.

    A node sends it every ten seconds. A sequence that waits for another node is not listed.
    """

    keys: tuple[Key, ...]


class CancelDone(Message, frozen=True):
    """No more messages follow for these keys."""

    keys: tuple[Key, ...]


class Crashed(Message, frozen=True):
    """This process ends because of an error of its own, in a step of these sequences.

    A router answers by cancelling them, so that the process knows that the router has heard it.
    """

    keys: tuple[Key, ...]
    failure: Failure


class AdapterLoaded(Message, frozen=True):
    """The node has loaded an adapter, or cannot."""

    name: AdapterName
    path: AdapterPath
    digest: str = ""  # of its files, in hex
    problem: str = ""


class AdaptersHeld(Message, frozen=True):
    """The adapters of run time that a node has, and all changes that it knows.

    It answers `ListAdapters`, and goes to all routers after a change.
    """

    entries: AdapterEntries
    loras: tuple[str, ...]  # by their names in requests


class Prefetched(Message, frozen=True):
    """The node has read so many of the blocks that a `Prefetch` names, and reads no more."""

    key: Key
    num_blocks: BlockCount = 0


class HandOver(Message, frozen=True):
    """Some cached blocks of a node that ends, which other nodes may read until then.

    The blocks that were used last come first. `HandedOver` answers.
    """

    number: Count
    hashes: PackedHashes
    idle_s: float  # for which all of them have been idle at most
    timeout_s: float


class DrainNode(Message, frozen=True):
    """Asks a router to drain a node. An operator's command repeats it until the node is gone.

    A router ignores it from a node.
    """

    node_id: NodeId


ToRouter = (
    Hello
    | Starting
    | Ready
    | Heartbeat
    | Accepted
    | FirstTokens
    | Tokens
    | Failed
    | CancelDone
    | Crashed
    | InProgress
    | DrainNode
    | CacheChanges
    | PromptLogprobs
    | Pooled
    | AdapterLoaded
    | AdaptersHeld
    | Prefetched
    | HandOver
)


# --- node to node -----------------------------------------------------------------------------


class PeerHello(Message, frozen=True):
    """The first message on every peer connection, in both directions."""

    version: Count
    node_id: NodeId
    epoch: Epoch
    model: str
    layout_fingerprint: str


class WantPrefix(Message, frozen=True):
    """Asks for the cached blocks of a prompt's first tokens.

    `Offered` or `Withdrawn` answers. A prefix is handed over as a whole prompt is: the node that
    has it sends what prefill sends to decode, and the node that reads it answers as decode does.
    """

    key: Key
    hashes: PackedHashes  # of the prompt's blocks (`blocks`), from the first one on
    num_held_blocks: BlockCount = 0  # that the reader has itself


class Offered(Message, frozen=True):
    """The sender holds all `num_blocks` blocks of this prompt until its lease ends."""

    key: Key
    num_tokens: Count
    num_blocks: BlockCount
    lease_s: float


class BlockRange(Message, frozen=True):
    """Blocks [first_block, first_block + len(block_ids)) of the prompt are final.

    `block_ids` and `generations` are those of the sender's pool.
    """

    key: Key
    first_block: BlockCount
    block_ids: tuple[BlockId, ...]
    generations: tuple[Generation, ...]
    # If `transfer.verify_kv` is on, this has a row for each piece in which a block is read, by rank
    # of the sender and then by heads. Each row has a checksum for each block.
    checksums: tuple[tuple[Checksum, ...], ...] = ()


class End(Message, frozen=True):
    """All block ranges were sent. After a whole prompt it has the first token of every choice."""

    key: Key
    tokens: tuple[FirstToken, ...]
    num_cached_tokens: Count = 0  # of the prompt, in prefill's prefix cache


class Withdrawn(Message, frozen=True):
    """The sender gives up this handoff, so its peer must stop reading the blocks."""

    key: Key
    failure: Failure


class Renewed(Message, frozen=True):
    """Confirms one `Renew` of this handoff. Confirmations come in the order of the renewals."""

    key: Key


class Done(Message, frozen=True):
    """Every read of this handoff has ended; its peer may reuse the blocks."""

    key: Key


class Renew(Message, frozen=True):
    """Extends the leases of these handoffs. The reader counts from when it sent this."""

    keys: tuple[Key, ...]


class Declined(Message, frozen=True):
    """The reader will not take this handoff (refused, cancelled, failed); no read is in flight."""

    key: Key
    failure: Failure


PeerMessage = (
    PeerHello
    | WantPrefix
    | Offered
    | BlockRange
    | End
    | Withdrawn
    | Renewed
    | Done
    | Renew
    | Declined
)
