"""Take over a request that another router began. `core` calls it after a search.

The caller has a part of each choice already. That part goes through the choice's detokenizer again,
so that the text goes on where it was cut, even inside a character or a stop string.
"""

from baton.protocol.ids import Key
from baton.router.reattaching import Claim
from baton.router.registry import Registry
from baton.router.request.events import AdoptedChoice, Place
from baton.router.request.leg import Request
from baton.router.request.search import FoundRequest, ReceivedPart
from baton.router.stream import RequestStream


def adopted(
    claim: Claim, found: FoundRequest, stream: RequestStream, registry: Registry
) -> tuple[AdoptedChoice, ...]:
    """Return every choice of the request, and bring `stream` to its caller's position."""
    choices: list[AdoptedChoice] = []
    for index in range(found.attached.num_choices):
        received = claim.received[index] if claim.received is not None else ReceivedPart()
        one = found.choices.get(index)
        if one is None:  # the caller has the whole choice, and its node has forgotten it
            stream.metrics.received(received.num_tokens)
            choices.append(AdoptedChoice(Key(claim.request_id, index), [], has_ended=True))
            continue
        node = registry.node(one.node) if one.held.is_running else None
        is_stopped = stream.replay(index, one.held.token_ids[: received.num_tokens])
        num_again = max(0, received.num_tokens - len(one.held.token_ids))
        if received.has_ended:  # nothing more comes of it
            stream.metrics.received(num_again)
        else:
            stream.expect_again(index, num_again)
        choices.append(
            AdoptedChoice(
                one.held.key,
                one.held.token_ids,
                received.num_tokens,
                received.has_ended or is_stopped,
                one.held.finish_reason,
                None if node is None else node.process,
            )
        )
    return tuple(choices)


def place_of(request: Request, choice: AdoptedChoice) -> Place:
    """Return the placement that a running sequence would have asked for."""
    num_prompt = len(request.token_ids)
    return Place(
        choice.key,
        num_tokens=num_prompt + len(choice.token_ids),
        num_choices=1,
        wants_decode=True,
        num_final_tokens=num_prompt + request.sampling.max_tokens,
    )
