"""Find out which token ids a server takes in prompts, where the user did not say.

The experiments ask once per target, before the plan is made. Ids are tried from above, one prompt
of one token each; a server that does not list its vocabulary answers 4xx to ids that it lacks.
"""

import asyncio

import msgspec

from baton.bench.client.ask import Session, ask
from baton.bench.client.target import Target
from baton.bench.plan.workload import AUTO_VOCABULARY, Vocabulary
from baton.bench.records import Outcome, Planned
from baton.protocol.errors import ConfigError

LOWEST_ID, HIGHEST_ID = AUTO_VOCABULARY
HIGHEST_IDS = (HIGHEST_ID, 4000, 2000, 1000, 500)


def accepted(target: Target) -> Vocabulary:
    """Return the widest range of which the server takes the highest id."""
    return asyncio.run(_accepted(target))


async def _accepted(target: Target) -> Vocabulary:
    plain = msgspec.structs.replace(target, timeline=False, token_ids=False)
    async with Session(plain) as session:
        for highest in HIGHEST_IDS:
            planned = Planned(index=0, at_s=None, output_tokens=1, prompt_ids=(highest,))
            record = await ask(session, plain, planned)
            if record.outcome is not Outcome.CLIENT_ERROR:
                return LOWEST_ID, highest
    raise ConfigError(
        f"{target.url} takes no prompt of token ids ({record.detail}): name ids that the model has "
        "with --vocabulary LOW-HIGH, or choose --workload text or chat"
    )
