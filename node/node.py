"""An engine process from start to exit, which is the same for prefill and decode nodes.

Heartbeats start before any slow work, so the router sees progress while weights load. One deadline
covers the start. A fatal error is one log line and a non-zero exit.
"""

import os
import secrets
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from baton.kv_transfer.connector import NodeConnector
from baton.kv_transfer.stores import ClaimedFolder
from baton.kv_transfer.transports import reaches_of
from baton.node.executor import Executor, ExecutorInfo
from baton.node.heartbeat import HeartbeatThread, Vitals
from baton.node.loop import EngineLoop
from baton.node.records import NodeObserver, folder_for_dumps
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.scheduler import NodeLimits, Scheduler
from baton.node.sockets import EngineSockets, RouterStanding
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import BatonError, InvariantBroken, NodeError
from baton.protocol.ids import Epoch, NodeId
from baton.protocol.messages import (
    ANY_PREFIX_READS,
    PREFETCHES,
    PREFIX_READS,
    PROTOCOL_VERSION,
    Crashed,
    Heartbeat,
    Hello,
    NodeInfo,
    Role,
)
from baton.runtime.channels.keys import load_keys
from baton.runtime.channels.listener import Channels
from baton.runtime.clock import Standstill, boottime
from baton.runtime.host import (
    devices_for,
    raise_descriptor_limit,
    reaches_out,
    threads_per_rank,
)
from baton.runtime.log import logger, setup_process_log
from baton.runtime.process import Interrupts, die_with_parent

if TYPE_CHECKING:
    from baton.node.node_http import NodeHttp

MakeScheduler = Callable[[BlockPool, NodeLimits], Scheduler]
MakeExecutor = Callable[[ClusterConfig, Epoch], Executor]

START_WATCH_S = 1.0  # between two looks at whether a start makes progress
LINGER_MS = 1000  # time for the last tokens to leave a node that has drained

log = logger("node")


class EngineNode:
    """One engine node. `run` is the whole life of its process."""

    def __init__(
        self,
        config: ClusterConfig,
        role: Role,
        make_scheduler: MakeScheduler,
        make_executor: MakeExecutor,
    ) -> None:
        device = config.transfer.device or devices_for(config.node)
        if not device and reaches_out(config.node):
            log.warning(
                "found no network device that leads to the routers, so only nodes on this host "
                "can be paired with this one; correct the names, or set transfer.device",
                routers=",".join(config.node.routers),
            )
        transfer = msgspec.structs.replace(config.transfer, device=device)
        self.config = msgspec.structs.replace(config, transfer=transfer)
        self.role = role
        self.node_id = NodeId(
            config.node.id or f"{socket.gethostname()}-{role}-{os.getpid()}"
        )
        self.epoch = Epoch(secrets.token_hex(8))
        self._make_scheduler = make_scheduler
        self._make_executor = make_executor
        self._vitals = Vitals()
        self._stopping = threading.Event()
        self._draining = threading.Event()
        self._drain_by_s: float | None = None
        self._hand_over_s = 0.0
        self._interrupts: Interrupts | None = None
        self._info: NodeInfo | None = None

    def run(self) -> int:
        """Serve until SIGTERM, drain, and return the exit code. Ctrl-C ends without a drain."""
        die_with_parent()
        setup_process_log(self.config.log, str(self.node_id))
        try:
            raise_descriptor_limit()
            with Interrupts(on_first=self.drain) as self._interrupts:
                self.serve()
        except BatonError as error:
            log.error(error.message, code=error.code)
            return 1
        log.info("stopped")
        return 0

    def stop(self) -> None:
        """Ask `serve` to return. Any thread may call this."""
        self._stopping.set()

    def drain(self) -> None:
        """Ask `serve` to return once its sequences end, or after `node.shutdown_timeout_s`."""
        self._draining.set()

    def serve(self) -> None:
        """Start, then work until `stop`. Raises the `BatonError` that ends this node."""
        keys = load_keys(self.config.keys)
        timeout_s = self.config.router.heartbeat_timeout_s
        open_channels = partial(Channels, keys, timeout_s)
        routers = self.config.node.routers
        heartbeats = HeartbeatThread(
            self._vitals, self.node_id, self.epoch, routers, boottime, open_channels
        )
        cache = self.config.cache
        folder = ClaimedFolder(Path(cache.folder), self.role) if cache.folder else None
        if folder is not None:
            cache = msgspec.structs.replace(cache, folder=str(folder.path))
        config = msgspec.structs.replace(self.config, cache=cache)
        executor = self._make_executor(config, self.epoch)
        observer = NodeObserver(self._vitals, self.node_id, self.config.log)
        hello = Hello(PROTOCOL_VERSION, self.node_id, self.role, self.epoch)
        sockets = EngineSockets(routers, hello, open_channels())
        http: NodeHttp | None = None
        try:
            http = self._start_http(sockets.standings)
            heartbeats.start()
            self._serve(executor, sockets, observer)
        finally:
            heartbeats.stop()
            if http is not None:
                http.stop()
            executor.close()
            sockets.close(LINGER_MS if self._drain_by_s is not None else 0)
            observer.close()
            if folder is not None:
                folder.close()

    def _start_http(
        self, standings: Callable[[], tuple[RouterStanding, ...]]
    ) -> "NodeHttp | None":
        if not self.config.node.http:
            return None
        # A node without HTTP saves the memory and time that importing aiohttp takes.
        from baton.node.node_http import NodeHttp

        name = self.config.model.shown_name
        node = (self.node_id, self.role)
        http = NodeHttp(
            self._vitals, boottime, node, name, lambda: self._info, standings
        )
        http.start(self.config.node.http)
        log.info(f"serving /live, /ready and /metrics on {http.url}")
        return http

    def _serve(
        self, executor: Executor, sockets: EngineSockets, observer: NodeObserver
    ) -> None:
        info = self._start(executor, sockets)
        endpoint = (
            sockets.listen(self.config.node.bind) if self.role == "decode" else ""
        )
        node = self._published(info, endpoint)
        pool = BlockPool(
            info.num_blocks,
            info.layout.block_size,
            cache_prefixes=self.config.cache.enable_prefix_caching,
            state_blocks=info.layout.state_blocks,
            has_two_orders=info.has_two_orders
            and self.config.cache.prefix_reads != "any",
        )
        model = self.config.model
        limits = NodeLimits(
            info.facts.step.num_tokens,
            info.facts.step.num_slots,
            info.max_model_len,
            info.eos_token_ids,
            info.vocab_size,
            self.config.engine,
            info.draft_cost,
            info.facts.lora_modules,
            info.facts.tasks,
            model.max_loras if model.allow_runtime_lora_updating else 0,
        )
        loop = EngineLoop(
            self._make_scheduler(pool, limits),
            executor,
            NodeConnector(node, self.config.transfer),
            sockets,
            observer,
            boottime,
        )
        self._info = node
        if self._shares_blocks(info):
            self._hand_over_s = self.config.node.hand_over_timeout_s
        self._vitals.totals = lambda: observer.counters.totals(pool.counts)
        self._vitals.note(is_ready=True)
        sockets.ready(node)
        self._log_ready(info)
        try:
            self._work(loop, sockets)
        # Each of these is a bug.
        except (InvariantBroken, AssertionError, LookupError) as broken:
            try:
                path = folder_for_dumps(self.config.log.records)
                path /= f"{self.node_id}-{self.epoch}.events.jsonl"
                loop.ring.dump(path)
            except OSError as error:
                log.error(
                    "an invariant broke; its events cannot be kept",
                    reason=error.strerror,
                )
                raise broken from None
            log.error(
                "an invariant broke; the events before it, with prompts, are in a private file",
                file=str(path),
            )
            raise

    def _published(self, info: ExecutorInfo, endpoint: str) -> NodeInfo:
        """Return the information about this node that its routers and peers get."""
        cache = self.config.cache
        shares = self._shares_blocks(info)
        lends = shares and self.role == "decode"
        switches = {
            "batch_invariant": info.batch_invariant,
            "prefix_caching": cache.enable_prefix_caching,
            "verify_kv": self.config.transfer.verify_kv,
            PREFIX_READS: lends,
            ANY_PREFIX_READS: shares and cache.prefix_reads == "any",
            PREFETCHES: shares,
        }
        features = tuple(name for name, is_on in switches.items() if is_on)
        loaded = msgspec.structs.asdict(info)
        for own in ("draft_cost", "has_two_orders"):  # other processes need not know
            del loaded[own]
        loaded["facts"] = msgspec.structs.replace(
            info.facts, features=info.facts.features + features
        )
        return NodeInfo(
            node_id=self.node_id,
            epoch=self.epoch,
            role=self.role,
            control_endpoint=endpoint,
            reaches=reaches_of(info.ranks, self.config.transfer),
            **loaded,
        )

    def _shares_blocks(self, info: ExecutorInfo) -> bool:
        """Return whether other nodes may read what this one has cached.

        A state of a sequence cannot be read so: a cached one is of a checkpoint.
        """
        cache = self.config.cache
        is_on = cache.enable_prefix_caching and cache.prefix_reads != "off"
        return is_on and not info.layout.state_blocks

    def _log_ready(self, info: ExecutorInfo) -> None:
        of_tokens = info.num_blocks - info.layout.state_blocks
        kv_tokens = max(of_tokens, 0) * info.layout.block_size
        if kv_tokens < info.max_model_len:
            setting = "num_blocks" if self.config.cache.num_blocks else "memory_mib"
            log.warning(
                f"the KV pool holds {kv_tokens} tokens, so no sequence can be longer, although the "
                f"model takes {info.max_model_len}: raise cache.{setting}",
            )
        log.info(
            "ready",
            role=self.role,
            device=info.facts.device,
            dtype=info.facts.dtype,
            kv_tokens=kv_tokens,
            blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            transports=",".join(sorted(info.ranks[0].metadata)) or "none",
            threads=threads_per_rank(self.config.engine),
            batch_invariant=info.batch_invariant,
            compute=info.compute,
        )

    def _work(self, loop: EngineLoop, sockets: EngineSockets) -> None:
        try:
            while not self._stopping.is_set() and not self._has_drained(loop, sockets):
                loop.turn()
        except Exception as error:
            if loop.crashed_in is not None:
                # The routers must learn which requests were in the step, to stop one that ends node
                # after node.
                keys = tuple(part.key for part in loop.crashed_in.slices)
                failure = NodeError(
                    f"{self.node_id} ends because of an unexpected error: {error}"
                )
                sockets.send_crashed(Crashed(keys, failure.to_failure()))
            raise

    def _has_drained(self, loop: EngineLoop, sockets: EngineSockets) -> bool:
        if not (self._draining.is_set() or loop.is_asked_to_drain):
            return False
        now_s = boottime()
        if self._drain_by_s is None:
            is_hurried = self._interrupts is not None and self._interrupts.is_hurried
            timeout_s = 0.0 if is_hurried else self.config.node.shutdown_timeout_s
            self._drain_by_s = now_s + timeout_s
            loop.drain(min(self._hand_over_s, timeout_s))
            self._vitals.note(is_draining=True)
            # The thread may send its next heartbeat too late, after this process has ended.
            load = loop.scheduler.load()
            sockets.broadcast(
                Heartbeat(self.node_id, self.epoch, load, is_draining=True)
            )
            if not loop.is_idle:
                log.info("draining: running sequences finish, and new ones are refused")
        if loop.is_idle and loop.has_handed_over:
            return True
        if now_s < self._drain_by_s:
            return False
        left = loop.scheduler.load()
        # Else only the last step has not ended.
        if left.num_running or left.num_waiting:
            log.warning(
                "not drained in time: the remaining sequences go on at other nodes"
            )
        return True

    def _start(self, executor: Executor, sockets: EngineSockets) -> ExecutorInfo:
        """Load. End the process if its start hangs or a router refuses it."""
        seen = [("", 0, 0)]
        ended = threading.Event()
        watchdog = threading.Thread(
            target=self._watch_start, args=(seen, ended), daemon=True
        )
        watchdog.start()

        def progress(phase: str, done: int, total: int) -> None:
            seen[0] = phase, done, total
            self._vitals.note(phase=phase, done=done, total=total)
            sockets.starting()

        try:
            return executor.start(progress)
        finally:
            ended.set()

    def _watch_start(
        self, seen: list[tuple[str, int, int]], ended: threading.Event
    ) -> None:
        seconds = self.config.node.start_timeout_s
        standstill = Standstill(seconds)
        while not ended.wait(min(seconds, START_WATCH_S)):
            if standstill.lasts(seen[0]):
                log.error(f"no progress for {seconds:g} s (node.start_timeout_s)")
                os._exit(1)
