"""How the served model writes tool calls and reasoning, which its chat template shows."""

import msgspec

from baton.protocol.config import RouterConfig
from baton.protocol.errors import RequestError
from baton.router.chat_template import ChatTemplate
from baton.router.http.schema import Ask
from baton.router.http.turns import unsupported
from baton.router.response_parser import END_THINK, Parsing, ToolFormat


class ModelFormat(msgspec.Struct, frozen=True):
    tools: ToolFormat | None = None
    reasoning: bool = False

    @classmethod
    def of(cls, config: RouterConfig, template: ChatTemplate | None) -> "ModelFormat":
        """Return the formats that the settings name, or those of the template."""
        source = "" if template is None else template.source
        tools = config.tool_call_parser
        return cls(
            _tool_format(source) if tools == "auto" else tools,
            END_THINK in source
            if config.reasoning_parser == "auto"
            else config.reasoning_parser != "none",
        )

    def apply(self, ask: Ask) -> tuple[Ask, Parsing | None]:
        """Return a request in this format, and what to find in its response.

        Raises `RequestError` for tools that the model cannot call.
        """
        if not ask.is_chat or (ask.tools is None and not self.reasoning):
            return ask, None
        reasoning = Parsing(reasoning=self.reasoning, include_reasoning=ask.include_reasoning)
        if (tools := ask.tools) is None:
            return ask, reasoning
        if tools.is_required:
            raise unsupported("tool_choice")
        if tools.is_strict:
            raise unsupported("strict")
        if self.tools is None:
            text = (
                "the model's chat template shows no tool calls in a format that this server "
                "knows; router.tool_call_parser can name the format"
            )
            raise RequestError(text, code="unsupported", param="tools")
        if self.tools == "mistral":  # its tags are special tokens
            ask = msgspec.structs.replace(
                ask, sampling={**ask.sampling, "skip_special_tokens": False}
            )
        names = tuple(one.name for one in tools.functions) if self.tools == "llama3_json" else ()
        parsing = msgspec.structs.replace(
            reasoning,
            tools=self.tools,
            tool_names=names,
            parallel_tool_calls=tools.parallel_tool_calls,
        )
        return ask, parsing


def _tool_format(source: str) -> ToolFormat | None:
    """Return the format of the calls in a template's source; None if it has no tools."""
    if "tools" not in source:
        return None
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<tool_call>" in source and "<function=" not in source:  # Qwen3-Coder writes XML
        return "hermes"
    if "<|start_header_id|>" in source and '"parameters": ' in source:
        return "llama3_json"
    return None
