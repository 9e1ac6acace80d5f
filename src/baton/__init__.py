"""baton: disaggregated prefill/decode serving for large language models.

`LLM` is for scripts and notebooks, and `AsyncLLM` for event loops. Both take `SamplingParams` and
return `RequestOutput`. Each name is loaded when it is first used, so that `import baton` and the
command line stay quick.
"""

import importlib
from typing import TYPE_CHECKING

from baton.protocol import VERSION

if TYPE_CHECKING:
    from baton.async_llm import AsyncLLM
    from baton.llm import LLM
    from baton.pooling import (
        EmbeddingRequestOutput,
        PoolingParams,
        ScoringRequestOutput,
    )
    from baton.prompts import LoRARequest, TextPrompt, TokensPrompt
    from baton.protocol.sampling import (
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from baton.router.outputs import CompletionOutput, Logprob, RequestOutput

__version__ = VERSION
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_HOMES = {
    "LLM": "baton.llm",
    "AsyncLLM": "baton.async_llm",
    "CompletionOutput": "baton.router.outputs",
    "EmbeddingRequestOutput": "baton.pooling",
    "LoRARequest": "baton.prompts",
    "Logprob": "baton.router.outputs",
    "PoolingParams": "baton.pooling",
    "RepetitionDetectionParams": "baton.protocol.sampling",
    "RequestOutput": "baton.router.outputs",
    "RequestOutputKind": "baton.protocol.sampling",
    "SamplingParams": "baton.protocol.sampling",
    "ScoringRequestOutput": "baton.pooling",
    "StructuredOutputsParams": "baton.protocol.sampling",
    "TextPrompt": "baton.prompts",
    "TokensPrompt": "baton.prompts",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'baton' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
