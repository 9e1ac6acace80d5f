"""`LLM`, the class for scripts and notebooks: it takes prompts and returns outputs, no asyncio.

It runs an `AsyncLLM` on an event loop in a thread of its own, and owns the node processes. Any
thread may call it. It must not be able to do what `AsyncLLM` cannot.
"""

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from baton.async_llm import AsyncLLM, Prompt
from baton.protocol.config import ClusterConfig, ModelConfig
from baton.protocol.errors import BatonError, ConfigError
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import RequestOutput
from baton.router.registry import ServedModel
from baton.router.text.text import Text
from baton.started_nodes import Launcher

JOIN_TIMEOUT_S = 5.0

T = TypeVar("T")


class LLM:
    """A model in prefill and decode processes on this host, from construction to `shutdown`.

    It is also a context manager, and the end of the interpreter shuts it down in any case.
    """

    def __init__(self, model: str = "", *, launcher: Launcher | None = None, **settings: object):
        """Start the nodes and wait for them; raises `ConfigError` or `NodeError`.

        `model` is a Hugging Face model folder. `settings` are fields of `ClusterConfig`; a section
        may be a struct or a dict: `LLM(path, decode=2, cache={"memory_mib": 1024})`. Nodes print
        only warnings, unless `log` says otherwise.
        """
        self.config = _config(model, settings)
        self._llm = AsyncLLM.from_config(self.config, launcher=launcher)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)
        try:
            self._run(self._start())
        except BaseException:
            self.shutdown()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return one output per prompt, in the order of the prompts.

        A list of ints is one prompt of token ids. A list of `sampling_params` has one for each
        prompt. The first error of any prompt ends the others and is raised. `use_tqdm` shows a
        progress bar.
        """
        many = _as_list(prompts)
        params = _params_of(many, sampling_params)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[tokens]} output tokens"),
        )
        with Progress(*columns, console=Console(stderr=True), disable=not use_tqdm) as progress:
            bar = progress.add_task("Processed prompts", total=len(many), tokens=0)
            num_tokens = 0

            def ended(output: RequestOutput) -> None:
                nonlocal num_tokens
                num_tokens += output.metrics.num_output_tokens
                progress.update(bar, advance=1, tokens=num_tokens)

            return self._run(self._generate(many, params, ended))

    def get_tokenizer(self) -> Text:
        return self._llm.get_tokenizer()

    def get_model_config(self) -> ServedModel:
        return self._llm.get_model_config()

    def shutdown(self) -> None:
        """End the nodes and the loop. May be called again."""
        if self._loop.is_closed():
            return
        atexit.unregister(self.shutdown)
        try:
            self._run(self._llm.shutdown())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(JOIN_TIMEOUT_S)
            self._loop.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    # --- inside ---------------------------------------------------------------------------------

    def _run(self, work: Coroutine[None, None, T]) -> T:
        """Do `work` on the loop's thread and return its result. An interrupt here cancels it."""
        if self._loop.is_closed():
            work.close()
            raise BatonError("this LLM has been shut down", code="shutting_down")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _start(self) -> None:
        await self._llm.start()
        await self._llm.ready(self.config.node.start_timeout_s)

    async def _generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        ended: Callable[[RequestOutput], None],
    ) -> list[RequestOutput]:
        # More requests would only wait in the router's line, which is bounded.
        room = asyncio.Semaphore(self.config.router.max_inflight)

        async def one(prompt: Prompt, wanted: SamplingParams) -> RequestOutput:
            async with room:
                final = msgspec.structs.replace(wanted, output_kind="final")
                (output,) = [output async for output in self._llm.generate(prompt, final)]
            ended(output)
            return output

        try:
            async with asyncio.TaskGroup() as group:
                pairs = zip(prompts, params, strict=True)
                tasks = [group.create_task(one(prompt, wanted)) for prompt, wanted in pairs]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]


def _config(model: str, settings: dict[str, object]) -> ClusterConfig:
    plain: dict[str, object] = {"log": {"level": "warning"}}
    for name, value in settings.items():
        plain[name] = msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value
    try:
        config = msgspec.convert(plain, ClusterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error} in the settings of LLM") from error
    if not model:
        return config
    named: ModelConfig = msgspec.structs.replace(config.model, path=model)
    return msgspec.structs.replace(config, model=named)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | dict):
        return [prompts]
    many = list(prompts)
    if many and isinstance(many[0], int):
        return [many]  # type: ignore[list-item]
    return many  # type: ignore[return-value]


def _params_of(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts, but {len(params)} sampling_params")
    return list(params)
