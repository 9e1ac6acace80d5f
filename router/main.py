"""The router's process: the router with its HTTP side, from the start to a signal.

Nodes dial in on their own: this process starts none, and it must never load torch.
"""

import asyncio
import gc
import ssl

from baton.protocol import VERSION
from baton.protocol.config import ClusterConfig, ModelConfig, RouterConfig
from baton.protocol.errors import BatonError, ConfigError
from baton.router.http.app import App
from baton.router.http.metrics import StatsLine
from baton.router.http.request_log import Tracer, exporter_to
from baton.router.http.server import Server
from baton.router.text.chat_template import ChatTemplate
from baton.router.text_router import TextRouter
from baton.runtime.host import AcceptErrors, raise_descriptor_limit
from baton.runtime.log import logger, print_failure, setup_process_log
from baton.runtime.process import Interrupts, on_hangup
from baton.runtime.tls import renew, server_context

EXIT_FAILED = 1
# The thresholds of Python's garbage collector: new objects before a young collection, and young
# collections before an older one.
COLLECT_AFTER = (10_000, 10, 10)
HURRIED_S = 1.0  # for running responses when the user waits for the end

log = logger("router")


def run(config: ClusterConfig) -> int:
    """Serve until a signal and return the exit code.

    SIGTERM lets requests finish within `router.shutdown_timeout_s`, SIGINT within a
    second. A second signal ends the process at once.
    """
    setup_process_log(config.log, config.router.name)
    try:
        raise_descriptor_limit()
        with Interrupts() as interrupts:
            return asyncio.run(_serve(config, interrupts))
    except BatonError as error:
        print_failure(error.message, error.code)
        return EXIT_FAILED


async def _serve(config: ClusterConfig, interrupts: Interrupts) -> int:
    asked_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(interrupts.fileno(), asked_to_end.set)
    loop.set_exception_handler(AcceptErrors(loop))
    router = TextRouter.from_config(config)
    tracer = _tracer(config)
    app = App(router, config, _chat_template(config.model), tracer=tracer)
    tls = server_context(config.router)
    server = Server(app, config.router, tls)
    on_hangup(lambda: loop.call_soon_threadsafe(_renew, app, config.router, tls))
    stats = asyncio.create_task(
        _log_stats(StatsLine(app.metrics), router, config.log.stats_s)
    )
    try:
        router.start(config.control)
        url = await server.start()
        spare_collector()
        log.info(f"listening on {url}")
        _warn_if_open(config.router)
        await asked_to_end.wait()
        grace_s = (
            HURRIED_S if interrupts.is_hurried else config.router.shutdown_timeout_s
        )
        log.info(
            "draining: running requests finish, and new ones get status 503",
            within_s=grace_s,
        )
        await server.drain(grace_s)
    finally:
        stats.cancel()
        # This fails the running responses while their clients can still be told.
        router.close()
        await server.stop()
        if tracer is not None:
            tracer.close()
        loop.remove_reader(interrupts.fileno())
    return 0


def _renew(app: App, config: RouterConfig, tls: ssl.SSLContext | None) -> None:
    """Read the API keys and the certificate again, and keep the old ones where that fails."""
    try:
        app.access.read_keys()
        if tls is not None:
            renew(tls, config)
    except ConfigError as error:
        log.error("the old API keys and certificate stay in use", reason=error.message)
    else:
        log.info("API keys and certificates were read again")


def spare_collector() -> None:
    """Make the garbage collector run seldom, and never on the objects that exist now.

    Requests leave hardly any cycles behind. By default, the collector would run at every second or
    third request, and sometimes visit all open streams, which delays them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def _tracer(config: ClusterConfig) -> Tracer | None:
    if not config.router.otlp_traces_endpoint:
        return None
    return Tracer(
        exporter_to(config.router.otlp_traces_endpoint),
        config.model.shown_name,
        VERSION,
    )


def _chat_template(model: ModelConfig) -> ChatTemplate | None:
    """Return the chat template. Without a usable one, everything but chats is served."""
    try:
        return ChatTemplate.load(model.path, model.chat_template)
    except ConfigError as error:
        if model.chat_template:  # the user asked for this template
            raise
        log.warning("chats are not served", reason=error.message)
        return None


def _warn_if_open(router: RouterConfig) -> None:
    if not (router.wants_key or router.is_on_loopback or router.uds):
        log.warning(
            "anyone who can reach this address can use the model: require keys with --api-key",
            host=router.host,
        )


async def _log_stats(line: StatsLine, router: TextRouter, interval_s: float) -> None:
    """Log a line after every interval in which something happened."""
    while interval_s > 0:
        await asyncio.sleep(interval_s)
        fields = line.take(interval_s, router.health())
        if fields is not None:
            log.info("stats", **fields)
