"""Whether tokens that a server lost, doubled, swapped or replaced under load are found out.

Part of the self-test: the scripted server damages some answers of a load, and gives them whole when
the same requests are asked alone. `verify` has to name each, and nothing else.
"""

from collections import Counter

from baton.bench.client.load import Load, run_load
from baton.bench.client.target import Api, Target
from baton.bench.records import Message, Planned
from baton.bench.selftest.cases import FIRST_NUMBER
from baton.bench.selftest.scripted_server import ScriptedServer
from baton.bench.selftest.scripts import MODEL, Damage, Script, steady
from baton.bench.selftest.verdict import Count
from baton.bench.verify import MismatchKind, compare_outputs, reference

# (damage, how often, what it is to be called)
DAMAGES: tuple[tuple[Damage, int, str], ...] = (
    ("", 8, "right"),
    ("swapped", 1, MismatchKind.REORDERED),
    ("lost", 2, MismatchKind.LOST),
    ("doubled", 3, MismatchKind.DOUBLED),
    ("wrong", 4, MismatchKind.WRONG),
)
NUM_TOKENS = 20
RATE = 40.0


def find_damage(server: ScriptedServer, *, by_ids: bool) -> list[Count]:
    """A load with damaged answers, verified by token ids or by text alone."""
    damages = [damage for damage, count, _ in DAMAGES for _ in range(count)]
    chunks = steady(10.0, 5.0, NUM_TOKENS)
    whole = Script(chunks=chunks)
    server.play(
        {
            FIRST_NUMBER + index: [Script(chunks=chunks, damage=damage), whole]
            for index, damage in enumerate(damages)
        }
    )
    api: Api = "completions" if by_ids else "chat"
    target = Target(server.url, MODEL, api, timeout_s=60.0, timeline=False, token_ids=by_ids)
    requests = [_planned(index, by_ids) for index in range(len(damages))]
    records = run_load(Load(target=target, requests=requests, keep_text=not by_ids)).records
    found = {
        mismatch.index: mismatch.kind
        for mismatch in compare_outputs(reference(target, requests), records)
    }
    named = Counter((damage, str(found.get(i, "right"))) for i, damage in enumerate(damages))
    how = "ids" if by_ids else "text"
    return [
        Count(f"tokens {damage or 'whole'}, by {how}", kind, count, named[damage, str(kind)])
        for damage, count, kind in DAMAGES
    ]


def _planned(index: int, by_ids: bool) -> Planned:
    number, at_s = FIRST_NUMBER + index, index / RATE
    if by_ids:
        return Planned(index, at_s, NUM_TOKENS, prompt_ids=(number, 1))
    return Planned(index, at_s, NUM_TOKENS, messages=(Message("user", f"script {number}"),))
