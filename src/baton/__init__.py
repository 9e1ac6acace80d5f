"""baton: disaggregated prefill/decode serving for large language models.

The public names load what they need when they are first used, so that importing a room of baton
loads that room alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.protocol.sampling import SamplingParams
    from baton.router.async_llm import AsyncLLM
    from baton.router.llm import LLM

__all__ = ["LLM", "AsyncLLM", "SamplingParams"]

_HOMES = {
    "LLM": "baton.router.llm",
    "AsyncLLM": "baton.router.async_llm",
    "SamplingParams": "baton.protocol.sampling",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
