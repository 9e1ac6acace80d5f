"""A seeded enemy of the transfer: one schedule of requests, delays, cuts, deaths and bad reads.

`run_schedule` plays it and then lets everything end by itself; the checks are in `transfer_world`
and at the end here. The same random source gives the same schedule.
"""

from dataclasses import dataclass
from random import Random

from baton.kv_transfer.interfaces import KVReceived, PeerRank, Released
from baton.protocol.config import TransferConfig
from baton.protocol.ids import Epoch
from tests.support.connectors import FAILURE, key, node, rank_address
from tests.support.transfer_world import Process, Prompt, Reading, Session, World

LEASE_S = 3.0
DEGREES = ((1, 1), (1, 1), (2, 2), (1, 2), (2, 1), (2, 4), (4, 2))
MAX_SETTLING_STEPS = 40_000  # ten minutes of renewals, if decode never has blocks


@dataclass(frozen=True)
class Malice:
    """How often, relative to 100 for ordinary progress, each thing goes wrong."""

    cut: float = 1
    restart: float = 0.5
    give_up: float = 2
    bad_read: float = 3
    late: float = 6
    flap: float = 1


HARMLESS = Malice(cut=0, restart=0, give_up=0, bad_read=0, late=0, flap=0)


class Nemesis:
    def __init__(self, rng: Random, malice: Malice) -> None:
        self.rng = rng
        self.malice = malice
        self.world = World(TransferConfig(lease_s=LEASE_S))
        self.kv_heads = rng.choice((2, 4))
        # Of prefill and of decode nodes.
        self.degrees = dict(zip("pd", rng.choice(DEGREES), strict=True))
        self.num_started = 0
        self.attempts: dict[str, int] = {}
        for name in ("p0", "d0", *rng.choice(((), ("p1",), ("d1",)))):
            self._start(name, 1)
        for process in self._all():
            self.world.list_peers(process)

    def _start(self, name: str, life: int) -> None:
        role = "prefill" if name[0] == "p" else "decode"
        epoch, num_ranks = f"{name}-{life}", self.degrees[name[0]]
        info = node(
            name, role, num_ranks=num_ranks, kv_heads=self.kv_heads, epoch=Epoch(epoch),
            num_blocks=12, ranks=(rank_address(epoch),) * num_ranks,
        )  # fmt: skip
        self.world.start(info, self.rng.uniform(-500, 500))

    def _all(self, role: str = "") -> list[Process]:
        return [p for p in self.world.processes.values() if p.info.role.startswith(role)]

    def play(self, num_actions: int) -> None:
        bad = self.malice
        for _ in range(num_actions):
            action = self.rng.choices(
                (self._progress, self._cut, self._restart, self._give_up, self._bad_read,
                 self._sleep, self._flap),
                (100, bad.cut, bad.restart, bad.give_up, bad.bad_read, bad.late, bad.flap),
            )[0]  # fmt: skip
            action()

    def settle(self) -> None:
        """Stop all malice: everything must end by itself, even what is still broken."""
        for _ in range(MAX_SETTLING_STEPS):
            if not any(process.prompts for process in self._all()):
                return
            if not self._progress(new=False):
                self._tick()
        raise AssertionError("a handoff never ends")

    # --- actions -------------------------------------------------------------------------------

    def _progress(self, *, new: bool = True) -> bool:
        """One ordinary thing; False when there is nothing to do but to wait."""
        todo = [
            *((self._run, p) for p in self._all() if p.inbox),
            *((self._deliver, s) for s in self.world.sessions if s.up or s.down or s.is_broken),
            *((self._work_rank, p) for p in self._all("decode") if self._rank_work(p)),
            *((self._schedule, p) for p in self._all() if self._ready(p)),
        ]
        self.world.now_s += 0.001
        if new and (not todo or self.rng.random() < 0.15) and self._request():
            return True
        if not todo:
            return False
        action, subject = self.rng.choice(todo)
        action(subject)  # type: ignore[operator]
        return True

    def _run(self, process: Process) -> None:
        self.world.run(process)

    def _deliver(self, session: Session) -> None:
        if session.is_broken and self.rng.random() < 0.5:
            end = self.rng.choice((session.prefill, session.decode))
            if session in self.world.sessions:
                self.world.tell_loss(session, end)
        elif session.up and (not session.down or self.rng.random() < 0.5):
            self.world.deliver_up(session)
        elif session.down:
            self.world.deliver_down(session)

    def _rank_work(self, process: Process) -> list[tuple[int, PeerRank] | Reading]:
        """Ranks to connect and reads to go on with."""
        adding = [link for link, state in process.links.items() if state == "adding"]
        return [*adding, *(r for r in process.readings.values() if not r.is_frozen)]

    def _work_rank(self, process: Process) -> None:
        reading = self.rng.choice(self._rank_work(process))
        if isinstance(reading, tuple):
            self.world.connect(process, *reading)
        elif reading.is_cancelled and self.rng.random() < 0.7:
            self.world.end_read(process, reading, FAILURE)
        elif reading.copied < len(reading.command.remote):
            self.world.copy_block(process, reading)
        else:
            self.world.end_read(process, reading, None)

    def _ready(self, process: Process) -> list[Prompt]:
        """Prompts with which that node's scheduler can go on."""
        if process.info.role == "prefill":
            return [p for p in process.prompts.values() if not p.is_complete and not p.is_over]
        waiting = [p for p in process.prompts.values() if p.num_blocks and not p.is_over]
        return [p for p in waiting if not p.is_receiving and p.num_blocks <= len(process.free)]

    def _schedule(self, process: Process) -> None:
        prompt = self.rng.choice(self._ready(process))
        if process.info.role == "decode":
            self.world.land(
                process, prompt, self.rng.choice((0, 0, prompt.num_blocks - 1, prompt.num_blocks))
            )
        elif prompt.num_announced < prompt.num_blocks:
            self.world.announce(process, prompt, self.rng.randint(1, 3))
        else:
            self.world.complete(process, prompt)

    def _request(self) -> bool:
        """A new one or a newer attempt, perhaps with one leg only; False when nothing is free."""
        prefill, decode = (
            self.rng.choice(self._all("prefill")),
            self.rng.choice(self._all("decode")),
        )
        num_blocks = self.rng.randint(1, 4)
        if num_blocks > len(prefill.free):
            return False
        name = f"r{self.num_started}"
        if self.attempts and self.malice != HARMLESS and self.rng.random() < 0.2:
            name = self.rng.choice(list(self.attempts))
        self.num_started += 1
        attempt = self.attempts[name] = self.attempts.get(name, -1) + 1
        both = [
            lambda: self.world.offer(prefill, key(name, attempt), num_blocks, decode.name[0]),
            lambda: self.world.expect(decode, key(name, attempt), prefill.name[0]),
        ]
        if self.malice != HARMLESS and self.rng.random() < 0.1:
            both.pop(self.rng.randrange(2))
        for start in both:
            start()
        return True

    def _tick(self) -> None:
        """Move to the next deadline of any process, which then notices it in time or late."""
        world = self.world
        wakes = [p.wake_s - p.offset_s for p in self._all() if p.wake_s is not None]
        world.now_s = max(world.now_s, min(wakes, default=world.now_s)) + 1e-6
        for process in self._all():
            if process.wake_s is not None and process.wake_s <= world.local_s(process):
                world.run(process)

    def _sleep(self) -> None:
        seconds = (0.01, 0.1, 0.5, 1.0, LEASE_S, 2 * LEASE_S)
        self.world.now_s += self.rng.choices(seconds, (8, 8, 4, 4, 1, 1))[0]
        if self.rng.random() < 0.5:
            self._tick()

    def _cut(self) -> None:
        if self.world.sessions:
            self.world.cut(self.rng.choice(self.world.sessions))

    def _restart(self) -> None:
        old = self.rng.choice(self._all())
        self._start(old.name[0], int(old.name[1].rsplit("-", 1)[1]) + 1)
        self.world.list_peers(self.world.processes[old.name[0]])
        for process in self._all():
            if self.rng.random() < 0.7:
                self.world.list_peers(process)

    def _give_up(self) -> None:
        process = self.rng.choice(self._all())
        prompts = [p for p in process.prompts.values() if not p.is_over]
        if prompts:
            prompt = self.rng.choice(prompts)
            is_prefill = process.info.role == "prefill"
            (self.world.withdraw if is_prefill else self.world.abandon)(process, prompt)

    def _bad_read(self) -> None:
        process = self.rng.choice(self._all("decode"))
        if self.world.strays:
            stray = self.rng.choice(self.world.strays)
            if self.rng.random() < 0.3:
                self.world.quiesce(*stray)
            else:
                self.world.copy_block(*stray)
        if process.readings:
            reading = self.rng.choice(list(process.readings.values()))
            if reading.is_frozen or self.rng.random() < 0.3:
                reading.is_frozen = True
                self.world.copy_block(process, reading)
                return
            self.world.end_read(process, reading, FAILURE, quiesced=self.rng.random() < 0.5)
        elif process.links:
            self.world.disconnect(process, *self.rng.choice(list(process.links)))

    def _flap(self) -> None:
        process = self.rng.choice(self._all())
        self.world.list_peers(process, None if self.rng.random() < 0.5 else [])


def run_schedule(rng: Random, malice: Malice | None = None, num_actions: int = 150) -> Nemesis:
    nemesis = Nemesis(rng, malice or Malice())
    nemesis.play(num_actions)
    nemesis.settle()
    return nemesis


def successes(nemesis: Nemesis) -> tuple[int, int]:
    """Handoffs that landed, and that were released as landed."""
    reports = [report for process in nemesis._all() for report in process.reports]
    released = [r for r in reports if isinstance(r, Released) and r.failure is None]
    return sum(isinstance(report, KVReceived) for report in reports), len(released)
