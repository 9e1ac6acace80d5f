"""Which waiting requests a decode node gives blocks to, and how a prompt becomes its choices.

A request gets blocks only when the steps have a place for one of its choices, because a first token
is worthless if the second one must wait. Its other choices get places as they become free. Smaller
requests may pass the head of the line while it has no blocks, until it has waited for
`MAX_PASSED_S`.
"""

from itertools import islice

from baton.kv_transfer.interfaces import BeginReceive
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.checkpoints import num_reusable_tokens
from baton.node.scheduling.request import Request, Sequence
from baton.node.scheduling.requests import Requests
from baton.node.scheduling.scheduler import NodeLimits
from baton.protocol.blocks import blocks_needed
from baton.protocol.errors import Failure, Overloaded, RequestError
from baton.protocol.messages import NOT_CACHED, Accepted

MAX_PASSED_S = 1.0
# The number of requests behind the head of the line that one step considers.
MAX_PASSING = 8


def admit(requests: Requests, now_s: float, num_running: int, num_growing: int) -> None:
    """Give blocks to the requests that fit while each has a place in the steps.

    `num_running` requests run already. Each of the `num_growing` sequences that take steps keeps a
    block to grow into.
    """
    pool = requests.pool
    for request in list(islice(requests.line, MAX_PASSING + 1)):
        if num_running + len(requests.admitted) >= requests.limits.max_num_seqs:
            return
        if _lacks_too_much(requests, request):
            requests.fail(request, _not_cached())
        elif _admit_one(requests, now_s, request, num_growing):
            continue
        elif pool.num_owned == 0:  # blocks were quarantined after its arrival
            requests.fail(request, _shrunk())
        elif now_s - request.queued_s > MAX_PASSED_S or pool.num_free <= num_growing:
            return


def refusal(request: Request, pool: BlockPool, limits: NodeLimits) -> Failure | None:
    """Return why a request must be refused at once, or None."""
    longest = request.num_prompt_tokens + request.sampling.max_tokens
    longest = min(longest, limits.max_model_len)
    num_needed = blocks_needed(
        pool.block_size,
        request.prompt.num_tokens,
        longest,
        len(request.every),
        pool.state_blocks,
    )
    if num_needed > pool.num_blocks:
        text = "prompt, max_tokens and n together can never fit this node's KV pool"
        return RequestError(text, param="max_tokens").to_failure()
    if num_needed > pool.num_blocks - pool.num_quarantined:
        return _shrunk()
    return None


def _lacks_too_much(requests: Requests, request: Request) -> bool:
    """Return whether this node must compute more of a prompt than its router expected."""
    bound = request.max_uncached_tokens
    prompt = request.prompt
    if bound is None or prompt.num_tokens <= bound:
        return False
    num_known = num_reusable_tokens(requests.pool, prompt)
    num_known += requests.reads.num_held_tokens(prompt, num_known)
    return prompt.num_tokens - num_known > bound


def _admit_one(
    requests: Requests, now_s: float, request: Request, num_kept_free: int
) -> bool:
    pool = requests.pool
    prompt = request.prompt
    has_tail = prompt.num_tokens % pool.block_size != 0
    num_tails = (len(request.live) - 1) * (has_tail + pool.state_blocks)
    if not requests.reserve(now_s, request, num_tails, num_kept_free):
        return False
    num_cached = request.num_cached_tokens // pool.block_size
    if request.is_computed_here:
        requests.reads.begin(now_s, request, num_cached)
    else:
        missing = tuple(prompt.blocks[num_cached:])
        requests.outputs.to_connector.append(
            BeginReceive(request.key, num_cached, missing)
        )
    requests.outputs.send(
        request.origin, Accepted(request.key, request.num_cached_tokens)
    )
    return True


def _not_cached() -> Failure:
    text = "this node has cached less of the prompt than its router expected"
    return Overloaded(text, code=NOT_CACHED).to_failure()


def _shrunk() -> Failure:
    text = "so many of this node's KV blocks are quarantined that this request does not fit"
    return Overloaded(text).to_failure()


def fork_prompt(
    pool: BlockPool,
    request: Request,
    first_tokens: dict[int, int],
    *,
    repeats_last: bool = False,
) -> list[tuple[int, int]]:
    """Begin the sequences of a request, which take over the blocks of its prompt and the tails.

    All share the prompt's whole blocks. Its partial last block and its state are copied for each
    choice but the first, because a shared block is never written. `first_tokens` maps each choice
    that goes on to its first token. Return the copies to make before the first step, whose source
    and target each have one more reference until the copy is settled. With `repeats_last`, that
    step computes the last token of the prompt again, for its hidden state.
    """
    prompt = request.prompt
    tails = request.tails
    num_whole = prompt.num_tokens // pool.block_size
    whole = prompt.block_table[:num_whole]
    tail = prompt.block_table[num_whole:]
    written = [*tail, *prompt.state]
    copies: list[tuple[int, int]] = []
    for index, (choice, token_id) in enumerate(first_tokens.items()):
        pool.retain(whole)
        own = written
        if index > 0:
            own = [tails.pop() for _ in written]
            copies.extend(zip(written, own, strict=True))
            pool.retain(own)
        pool.retain(written)
        request.sequences[choice] = Sequence(
            request,
            prompt.key.of_choice(choice),
            [*prompt.token_ids, token_id],
            block_table=[*whole, *own[: len(tail)]],
            state=own[len(tail) :],
            chain=list(prompt.chain),
            hashes=list(prompt.hashes),
            num_computed_tokens=prompt.num_tokens,
            num_planned_tokens=prompt.num_tokens,
            num_state_tokens=prompt.num_tokens,
            num_repeated=1 if repeats_last else 0,
        )
    pool.release(prompt.blocks)
    pool.release(tails)
    request.tails = []
    request.live = set(first_tokens)
    return copies
