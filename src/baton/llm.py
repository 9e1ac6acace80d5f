"""`LLM`, the class for scripts and notebooks, which takes prompts and returns outputs.

It needs no asyncio: it runs an `AsyncLLM` on an event loop in a thread of its own, and owns the
node processes. Any thread may call it. It must offer nothing that `AsyncLLM` does not.
"""

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from baton.async_llm import AsyncLLM, Launcher
from baton.llm_settings import Model, config_of
from baton.pooling import EmbeddingRequestOutput, PoolingParams, ScoringRequestOutput
from baton.prompts import LoRARequest, Prompt, TokensPrompt, as_list
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import BatonError, RequestError
from baton.protocol.sampling import RequestOutputKind, SamplingParams
from baton.router.core.health import ServedModel
from baton.router.core.node_link import ProfileState
from baton.router.outputs import RequestOutput
from baton.tokenizer import Conversation, ModelTokenizer

JOIN_TIMEOUT_S = 5.0

T = TypeVar("T")
Work = Callable[[], Coroutine[None, None, T]]


class LLM:
    """A model in prefill and decode processes on this host, from construction to `shutdown`.

    It is also a context manager, and the end of the interpreter always shuts it down.
    """

    def __init__(
        self,
        model: Model = "",
        *,
        config: ClusterConfig | None = None,
        seed: int | None = None,
        launcher: Launcher | None = None,
        **settings: object,
    ) -> None:
        """Start the nodes and wait for them. Raises `ConfigError` or `NodeError`.

        The arguments are those of `AsyncLLM`: `LLM(path, decode=2, cache={"memory_mib": 1024})`.
        """
        whole = config_of(model, settings, config)
        self._llm = AsyncLLM(config=whole, seed=seed, launcher=launcher)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="llm", daemon=True
        )
        self._thread.start()
        atexit.register(self.shutdown)
        try:
            self._run(self._llm.begin())
        except BaseException:
            self.shutdown()
            raise

    @property
    def config(self) -> ClusterConfig:
        return self._llm.config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Return one output per prompt, in the order of the prompts.

        A list of ints is one prompt of token ids. A list of `sampling_params` has one for each
        prompt; `get_default_sampling_params` replaces missing ones. The first error of any prompt
        ends the others and is raised. `use_tqdm` shows a progress bar. `lora_request` chooses an
        adapter, for all prompts or, as a list, for each. The first use of one that is not in
        `model.lora_modules` starts the nodes again.
        """
        many = as_list(prompts)
        params = self._params_of(many, sampling_params)
        if lora_request is None or isinstance(lora_request, LoRARequest):
            adapters = [lora_request] * len(many)
        else:
            adapters = list(lora_request)
        if len(adapters) != len(many):
            raise ValueError(
                f"there are {len(many)} prompts, but {len(adapters)} lora_requests"
            )
        for adapter in dict.fromkeys(filter(None, adapters)):
            self._run(self._llm.add_lora(adapter))
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[tokens]} output tokens"),
        )
        works = [
            partial(self._whole, *each)
            for each in zip(many, params, adapters, strict=True)
        ]
        with Progress(
            *columns, console=Console(stderr=True), disable=not use_tqdm
        ) as progress:
            bar = progress.add_task("Processed prompts", total=len(many), tokens=0)
            num_tokens = 0

            def ended(output: RequestOutput) -> None:
                nonlocal num_tokens
                num_tokens += output.metrics.num_output_tokens
                progress.update(bar, advance=1, tokens=num_tokens)

            return self._run(self._all(works, ended))

    def chat(  # noqa: PLR0913  (the arguments are vLLM's)
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Return one output per conversation: the model's response to its last message.

        A conversation is a list of messages, and a message a dict of `role` and `content`. The
        model's chat template makes the prompt and sees `tools`, in OpenAI's form, and
        `chat_template_kwargs`. With `continue_final_message` and without `add_generation_prompt`,
        it goes on with the last message instead. Everything else is as in `generate`.
        """
        tokenizer = self.get_tokenizer()
        prompts: list[Prompt] = []
        for conversation in _conversations(messages):
            text = tokenizer.apply_chat_template(
                conversation,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append(TokensPrompt(prompt=text, prompt_token_ids=ids))
        return self.generate(prompts, sampling_params, use_tqdm, lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in the order of the prompts.

        Errors, `use_tqdm` and `lora_request` are as in `generate`.
        """
        if lora_request is not None:
            self._run(self._llm.add_lora(lora_request))
        embed = partial(
            self._llm.embed, pooling_params=pooling_params, lora_request=lora_request
        )
        return self._pooled(
            [partial(embed, prompt) for prompt in as_list(prompts)], use_tqdm
        )

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each text of `data_2` fits that of `data_1`, which may be one for all."""
        queries = [data_1] if isinstance(data_1, str) else list(data_1)
        documents = [data_2] if isinstance(data_2, str) else list(data_2)
        if len(queries) == 1:
            queries *= len(documents)
        if len(queries) != len(documents):
            raise ValueError(
                f"there are {len(queries)} queries, but {len(documents)} documents"
            )
        works = [
            partial(self._llm.score, *pair, pooling_params)
            for pair in zip(queries, documents, strict=True)
        ]
        return self._pooled(works, use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Forget the prefix caches of all nodes. Requests that run keep what they use."""
        return self._run(self._llm.reset_prefix_cache())

    def start_profile(self) -> ProfileState:
        """Let every node record its steps with torch's profiler, until `stop_profile`."""
        return self._run(self._llm.start_profile())

    def stop_profile(self) -> ProfileState:
        """End the profile. Its nodes write their traces and log the files' names meanwhile."""
        return self._run(self._llm.stop_profile())

    def get_tokenizer(self) -> ModelTokenizer:
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the defaults of the model's generation_config.json, else the usual ones."""
        return self._llm.get_default_sampling_params()

    def get_model_config(self) -> ServedModel:
        return self._llm.get_model_config()

    def shutdown(self) -> None:
        """End the nodes and the loop. It may be called again."""
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

    def __exit__(self, *_: object) -> None:
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

    async def _whole(
        self, prompt: Prompt, wanted: SamplingParams, lora: LoRARequest | None
    ) -> RequestOutput:
        final = wanted.clone(output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = self._llm.generate(prompt, final, lora_request=lora)
        (output,) = [output async for output in outputs]
        return output

    def _pooled(self, works: Sequence[Work[T]], use_tqdm: bool) -> list[T]:
        """Do works that bring no tokens, with a progress bar."""
        with Progress(console=Console(stderr=True), disable=not use_tqdm) as progress:
            bar = progress.add_task("Processed prompts", total=len(works))
            return self._run(self._all(works, lambda _: progress.advance(bar)))

    async def _all(
        self, works: Sequence[Work[T]], ended: Callable[[T], None]
    ) -> list[T]:
        """Return the results in the order of the works. The first error ends the others."""
        # Further requests would only wait in the router's line, which is bounded.
        room = asyncio.Semaphore(self.config.router.max_inflight)

        async def result_of(work: Work[T]) -> T:
            async with room:
                result = await work()
            ended(result)
            return result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(result_of(work)) for work in works]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _params_of(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * len(prompts)
        many = list(params) if isinstance(params, Sequence) else [params]
        if not all(isinstance(one, SamplingParams) for one in many):
            text = "sampling_params must be SamplingParams or a list of them"
            raise RequestError(text, param="sampling_params")
        if len(many) != len(prompts):
            raise ValueError(
                f"there are {len(prompts)} prompts, but {len(many)} sampling_params"
            )
        return many


def _conversations(
    messages: Conversation | Sequence[Conversation],
) -> list[Conversation]:
    """Return one conversation or many as a list. A list of messages is one conversation."""
    if all(isinstance(message, Mapping) for message in messages):
        return [messages] if messages else []  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]
