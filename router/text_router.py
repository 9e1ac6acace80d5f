"""`TextRouter`, the router with text, which turns prompts into streams of text and tokens.

It tokenizes a prompt once and passes the ids to `core`, which sees no text. It starts no nodes:
nodes dial in on their own. It never loads torch.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from baton.protocol.blocks import BlockHash, BlockKey, prompt_keys
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError, RequestError
from baton.protocol.pooling import Pooling
from baton.protocol.sampling import SamplingParams
from baton.router.core.admission import (
    check_num_logprobs,
    check_pooled,
    check_prompt,
    check_vocabulary,
    fit,
    sampling_of,
)
from baton.router.core.health import Health, ServedModel
from baton.router.core.request import NO_CALLER, Caller
from baton.router.core.router_core import RouterCore
from baton.router.core.stream import ReceivedPart, RequestStream
from baton.router.text.grammars import Forms, after_reasoning
from baton.router.text.response_parser import Parsing
from baton.router.text.tokenizer import Text, too_long
from baton.runtime.log import logger

log = logger("router")

# The blocks of a prompt up to this length are hashed in a fraction of a millisecond.
MAX_HASHED_ON_LOOP = 4096
# Of prompts of which no tokens are wanted.
_POOLED = SamplingParams(max_tokens=1, seed=0)


class TextRouter:
    """One router. It lives on the event loop that called `start`."""

    def __init__(
        self,
        config: ClusterConfig,
        core: RouterCore,
        text: Text,
        sampling: dict[str, object] | None = None,
    ) -> None:
        """`sampling` holds the model's defaults for requests over HTTP."""
        self._config = config.model
        self._is_cache_aware = config.router.routing == "cache-aware"
        self.core = core
        self._text = text
        self._is_closed = False
        self._sampling = sampling or {}
        self._served: ServedModel | None = None
        self._served_at = 0  # the version of the registry
        self._forms = Forms()

    @classmethod
    def from_config(cls, config: ClusterConfig) -> "TextRouter":
        """Make a router for the model that `config` names.

        Raises `ConfigError` if the model's folder has no usable tokenizer, or invalid sampling
        defaults.
        """
        model = config.model
        if not model.path:
            raise ConfigError(
                "model.path is empty: set it to a Hugging Face model folder"
            )
        sampling = (
            sampling_of_model(model.path) if model.generation_config == "auto" else {}
        )
        text = Text.load(model.path)
        if text.problem_of_forms:
            log.warning(
                "requests for a form are refused, because of the model's tokenizer",
                problem=text.problem_of_forms,
            )
        return cls(config, RouterCore(config), text, sampling)

    def start(self, endpoint: str) -> str:
        """Open the endpoint that nodes dial, and return its address. Raises `ConfigError`."""
        return self.core.start(endpoint)

    async def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str | None = None,
        parsing: Parsing | None = None,
        caller: Caller = NO_CALLER,
        received: Sequence[ReceivedPart] = (),
    ) -> RequestStream:
        """Check, tokenize and queue a request. Raises `RequestError` or `Overloaded`.

        The caller must wait for the end of the stream or `close` it. The outputs have `request_id`,
        which is the caller's name for the request or, by default, the router's. `parsing` says
        what the outputs have apart from their text, and `received` what the client has of each
        choice: the outputs go on from there.
        """
        limits = self.core.limits()
        max_tokens = limits.max_model_len - 1
        if isinstance(prompt, str):
            token_ids = await self._text.encode(prompt, max_tokens=max_tokens)
        elif len(prompt) > max_tokens:
            raise too_long(max_tokens)
        else:
            token_ids = list(prompt)  # the caller may change its own object
        check_prompt(token_ids, limits.vocab_size, limits.max_model_len)
        is_computed_whole = params.prompt_logprobs is not None
        is_cached = self._is_cache_aware and not is_computed_whole
        keys = await self._keys_of(token_ids, caller.scope.root) if is_cached else ()
        grammar = await self._grammar_of(params, caller)
        if grammar and parsing is not None and parsing.reasoning:
            is_open = self._text.opens_reasoning(token_ids, parsing.reasoning)
            grammar = after_reasoning(grammar, parsing.reasoning, is_open=is_open)
        bad_words = await self._bad_words_of(params)
        detokenizers = [
            self._text.detokenizer(token_ids, params, i, parsing)
            for i in range(params.n)
        ]
        internal_id = self.core.new_id()
        stream = RequestStream(
            request_id or internal_id,
            token_ids,
            params,
            detokenizers,
            partial(self.core.give_up, internal_id),
            received,
        )
        check_num_logprobs(stream.num_prompt_logprobs)
        max_tokens, stream.metrics.max_tokens_clamped = fit(
            len(token_ids), params, self.core.limits()
        )
        sampling = sampling_of(params, max_tokens, caller.scope, grammar, bad_words)
        self.core.submit(internal_id, stream, sampling, keys, caller.tenant)
        return stream

    async def pool(
        self,
        token_ids: list[int],
        pooling: Pooling,
        request_id: str | None = None,
        caller: Caller = NO_CALLER,
    ) -> RequestStream:
        """Queue a prompt of which no tokens are wanted. Raises `RequestError` or `Overloaded`.

        The caller must wait for the end of the stream, which then has `pooled`, or `close` it.
        """
        limits = self.core.limits()
        check_vocabulary(token_ids, limits.vocab_size)
        check_pooled(len(token_ids), limits)
        # Of other kinds, all rows are computed, whatever is cached.
        is_cached = self._is_cache_aware and pooling in ("last", "classify")
        keys = await self._keys_of(token_ids, caller.scope.root) if is_cached else ()
        internal_id = self.core.new_id()
        on_close = partial(self.core.give_up, internal_id)
        stream = RequestStream(
            request_id or internal_id, token_ids, _POOLED, (), on_close
        )
        sampling = msgspec.structs.replace(
            sampling_of(_POOLED, 1, caller.scope), pooling=pooling
        )
        self.core.submit(internal_id, stream, sampling, keys, caller.tenant)
        return stream

    @property
    def num_prefill_nodes(self) -> int:
        return len(self.core.registry.in_service("prefill"))

    async def _grammar_of(self, params: SamplingParams, caller: Caller) -> str:
        """Return the grammar of the wanted form; "" without one. Raises `RequestError`."""
        form = params.structured_outputs
        if form is None:
            return ""
        if problem := self._text.problem_of_forms:
            text = f"the model's tokenizer allows no form: {problem}"
            raise RequestError(text, code="unsupported", param="structured_outputs")
        return await self._forms.grammar_of(form, caller.tenant.name)

    async def _bad_words_of(
        self, params: SamplingParams
    ) -> tuple[tuple[int, ...], ...]:
        """Return the bad words as token ids. Raises `RequestError` for ids out of range."""
        vocab_size = self.core.limits().vocab_size
        for name in ("allowed_token_ids", "logit_bias"):
            if max(getattr(params, name) or (0,)) >= vocab_size:
                text = f"the ids of {name} must be below {vocab_size}, the size of the vocabulary"
                raise RequestError(text, param=name)
        # A word begins with another token after a blank.
        spellings = [
            s for word in params.bad_words or () for s in (word, f" {word.lstrip()}")
        ]
        words = [
            await self._text.encode(s, add_special_tokens=False) for s in spellings
        ]
        return tuple(dict.fromkeys(map(tuple, filter(None, words))))

    async def _keys_of(
        self, token_ids: list[int], root: BlockHash
    ) -> tuple[BlockKey, ...]:
        """Return the keys of a prompt's blocks, hashed off the event loop if there are many."""
        block_size = self.core.limits().block_size
        if len(token_ids) < block_size:
            return ()
        if len(token_ids) <= MAX_HASHED_ON_LOOP:
            return prompt_keys(token_ids, block_size, root)
        return await asyncio.to_thread(prompt_keys, token_ids, block_size, root)

    def close(self) -> None:
        """End every request and the connections to all nodes. It may be called again."""
        self._is_closed = True
        self.core.close()
        self._text.close()
        self._forms.close()

    def health(self) -> Health:
        return self.core.health()

    @property
    def errored(self) -> bool:
        """Return whether the router has ended for a reason other than `close`."""
        return self.core.has_failed and not self._is_closed

    def get_tokenizer(self) -> Text:
        return self._text

    def get_model_config(self) -> ServedModel:
        """Return the model that the nodes serve. Raises `Overloaded` until a node is ready."""
        registry = self.core.registry
        if self._served is None or self._served_at != registry.version:
            self._served = self._model_now()
            self._served_at = registry.version
        return self._served

    def _model_now(self) -> ServedModel:
        max_model_len = self.core.known_limits().max_model_len
        model = self.core.registry.model
        assert model is not None, "there are limits only with a model"
        name, *other_names = self._config.served_names
        return ServedModel(
            name=name,
            other_names=tuple(other_names),
            path=self._config.path,
            fingerprint=model.model,
            layout_fingerprint=model.layout.fingerprint,
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            block_size=model.layout.block_size,
            eos_token_ids=model.eos_token_ids,
            dtype=model.facts.dtype,
            lora_modules=model.facts.lora_modules,
            run_time_loras=self.core.adapters.versions,
            sampling=self._sampling,
            tasks=model.facts.tasks,
        )


class _GenerationConfig(msgspec.Struct):
    """The fields of the file that concern sampling. Null means the usual default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    repetition_penalty: float | None = None


def default_params(model_path: str) -> SamplingParams:
    """Return the defaults of a folder's model. Raises `ConfigError` as `sampling_of_model` does."""
    return SamplingParams(**sampling_of_model(model_path))  # type: ignore[arg-type]


def sampling_of_model(model_path: str) -> dict[str, object]:
    """Return the fields of `SamplingParams` that a model folder sets.

    Raises `ConfigError` if they are not numbers.
    """
    path = Path(model_path) / "generation_config.json"
    try:
        data = path.read_bytes() if path.is_file() else b"{}"
        found = msgspec.structs.asdict(
            msgspec.json.decode(data, type=_GenerationConfig)
        )
        found["max_tokens"] = found.pop("max_new_tokens")
        given = {name: value for name, value in found.items() if value is not None}
        SamplingParams(**given)  # the constructor raises for values out of range
        return given
    except (OSError, msgspec.DecodeError, RequestError) as error:
        raise ConfigError(
            f"cannot take sampling defaults from {path}: {error}"
        ) from error
