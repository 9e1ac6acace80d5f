"""From a body to the prompts that a model gets: its adapter, its chat template, its tool calls."""

from array import array
from collections.abc import Callable, Mapping

import msgspec

from baton.protocol.config import RouterConfig
from baton.protocol.errors import RequestError
from baton.protocol.sampling import StructuredOutputsParams
from baton.router.core.admission import check_prompt
from baton.router.core.health import ServedModel
from baton.router.http.api.anthropic import parse_message
from baton.router.http.api.responses_body import parse_response
from baton.router.http.api.schema import (
    BodyPrompt,
    Chat,
    Endpoint,
    ParsedRequest,
    parse_chat,
    parse_completion,
)
from baton.router.http.api.turns import (
    Function,
    ToolUse,
)
from baton.router.http.errors import blaming
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.grammars import WHITE_SPACE
from baton.router.text.response_parser import END_THINK, Parsing, ToolFormat
from baton.router.text.tokenizer import Text
from baton.runtime.log import clip

_PARSERS: dict[Endpoint, Callable[[bytes, Mapping[str, object]], ParsedRequest]] = {
    "completions": parse_completion,
    "chat": parse_chat,
    "responses": parse_response,
    "messages": parse_message,
}


class Job(msgspec.Struct, frozen=True):
    """A body to prepare for the model that is served."""

    endpoint: Endpoint
    model: ServedModel


class Prepared(msgspec.Struct, frozen=True):
    """A checked body whose prompts are token ids, each packed by `packed`."""

    parsed: ParsedRequest
    prompts: list[bytes]
    echoes: list[str]


def prepare(job: Job, data: bytes, text: Text, template: ChatTemplate | None) -> Prepared:
    """Return what a body asks for. Raises `RequestError`."""
    parsed = parse_body(job, data)
    prompts, echoes = [], []
    for prompt in parsed.prompts:
        with blaming(parsed.sent):
            token_ids = _ids_of(prompt, job.model, text, template)
            check_ids(token_ids, job.model)
        prompts.append(packed(token_ids))
        if parsed.echo:
            echoes.append(prompt if isinstance(prompt, str) else text.decode(token_ids))
    return Prepared(msgspec.structs.replace(parsed, prompts=()), prompts, echoes)


def parse_body(job: Job, data: bytes) -> ParsedRequest:
    """Return the checked body of a request to the model. Raises `RequestError`."""
    parse, model = _PARSERS[job.endpoint], job.model
    parsed = parse(data, model.sampling)
    if not (lora := lora_of(parsed.model, model)):
        return parsed
    return msgspec.structs.replace(parsed, scope=msgspec.structs.replace(parsed.scope, lora=lora))


def lora_of(name: str | None, model: ServedModel) -> str:
    """Return the adapter that a body's `model` names, or "" for the model itself.

    Raises `RequestError` if this server has neither.
    """
    if not name or name in (model.name, model.path):
        return ""
    if name in model.lora_modules:
        return name
    known = ", ".join(map(repr, (model.name, *model.lora_modules)))
    text = f"the model {clip(name)!r} does not exist; this server has {known}"
    raise RequestError(text, code="model_not_found", param="model", http_status=404)


def check_ids(token_ids: list[int], model: ServedModel) -> None:
    """Raise `RequestError` for a prompt that the model cannot take."""
    check_prompt(token_ids, model.vocab_size, model.max_model_len)


def rendered(chat: Chat, template: ChatTemplate | None) -> str:
    """Return a chat as the text of a prompt. Raises `RequestError`."""
    if template is None:
        text = "this model has no chat template; use /v1/completions"
        raise RequestError(text, code="no_chat_template", http_status=404)
    return template.render(
        chat.messages,
        tools=chat.tools,
        add_generation_prompt=chat.add_generation_prompt,
        options=chat.options,
    )


def packed(token_ids: list[int]) -> bytes:
    return array("i", token_ids).tobytes()


def unpacked(data: bytes) -> list[int]:
    return array("i", data).tolist()


def _ids_of(
    prompt: BodyPrompt, model: ServedModel, text: Text, template: ChatTemplate | None
) -> list[int]:
    max_tokens = model.max_model_len - 1
    if isinstance(prompt, str):
        return text.encode_now(prompt, max_tokens=max_tokens)
    if isinstance(prompt, Chat):
        return text.encode_now(rendered(prompt, template), False, max_tokens)
    return prompt


class ModelFormat(msgspec.Struct, frozen=True):
    tools: ToolFormat | None = None
    reasoning: bool = False

    @classmethod
    def of(cls, config: RouterConfig, template: ChatTemplate | None) -> "ModelFormat":
        """Return the formats that the settings name, or those of the template."""
        source = "" if template is None else template.tools_source
        tools = config.tool_call_parser
        return cls(
            _tool_format(source) if tools == "auto" else tools,
            END_THINK in source
            if config.reasoning_parser == "auto"
            else config.reasoning_parser != "none",
        )

    def apply(self, parsed: ParsedRequest) -> tuple[ParsedRequest, Parsing | None]:
        """Return a request in this format, and what to find in its response.

        Raises `RequestError` for tools that the model cannot call.
        """
        if not parsed.is_chat or (parsed.tools is None and not self.reasoning):
            return parsed, None
        reasoning = Parsing(reasoning=self.reasoning, include_reasoning=parsed.include_reasoning)
        if (tools := parsed.tools) is None:
            return parsed, reasoning
        if self.tools is None and not tools.is_required:
            text = (
                "the model's chat template shows no tool calls in a format that this server "
                "knows; router.tool_call_parser can name the format"
            )
            raise RequestError(text, code="unsupported", param="tools")
        written = self.tools or "hermes"  # a grammar makes any model write it
        sampling = {**parsed.sampling}
        if written == "mistral":  # its tags are special tokens
            sampling["skip_special_tokens"] = False
        if tools.is_required or tools.is_strict:
            if "structured_outputs" in sampling:
                text = f"{parsed.form_param} cannot be kept beside tool calls that must have a form"
                raise RequestError(text, param=parsed.form_param)
            sampling["structured_outputs"] = form_of_calls(tools, written)
            parsed = msgspec.structs.replace(parsed, form_param="tools")
        parsed = msgspec.structs.replace(parsed, sampling=sampling)
        _ = parsed.params  # min_tokens and ignore_eos are refused beside a form
        names = tuple(one.name for one in tools.functions) if written == "llama3_json" else ()
        parsing = msgspec.structs.replace(
            reasoning,
            tools=written,
            tool_names=names,
            parallel_tool_calls=tools.parallel_tool_calls,
        )
        return parsed, parsing


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


# A schema of only these keywords names all of its properties.
_CLOSED_KEYWORDS = {"type", "properties", "required", "title", "description", "$defs", "$schema"}


class _Syntax(msgspec.Struct, frozen=True):
    """How a format writes calls: `open`, calls apart by `between`, and `close`."""

    begin: str  # of a call, up to the name
    arguments: str  # between name and arguments
    end: str
    between: str
    open: str = ""
    close: str = ""


_SYNTAX: dict[ToolFormat, _Syntax] = {
    "hermes": _Syntax(
        '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n"
    ),
    "llama3_json": _Syntax('{"name": "', '", "parameters": ', "}", between="; "),
    "mistral": _Syntax(
        '{"name": "', '", "arguments": ', "}", between=", ", open="[TOOL_CALLS][", close="]"
    ),
}


def form_of_calls(tools: ToolUse, written: ToolFormat) -> StructuredOutputsParams:
    """Return the form of a response in which calls fit the schemas of their tools.

    Unless a call is required, there may be text before it, or no call.
    """
    syntax = _SYNTAX[written]
    begin, end = syntax.open + syntax.begin, syntax.end + syntax.close
    if not tools.is_required and written != "llama3_json":
        structures = [
            {
                "begin": begin + one.name + syntax.arguments,
                "schema": one.parameters if one.strict and one.parameters else {"type": "object"},
                "end": end,
            }
            for one in tools.functions
        ]
        trigger = "<tool_call>" if written == "hermes" else syntax.open
        form: dict[str, object] = {"structures": structures, "triggers": [trigger]}
        return StructuredOutputsParams(structural_tag=form)
    more = f" ({_literal(syntax.between)} call)*" if tools.parallel_tool_calls else ""
    around = [_literal(text) if text else "" for text in (syntax.open, syntax.close)]
    rules = [
        f"start: calls{'' if tools.is_required else ' | FREE'}",
        f"calls: {around[0]} call{more} {around[1]}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(tools.functions))),
    ]
    if not tools.is_required:
        rules.append(r"FREE: /(?s:\s*([^{<\s].*)?)/")
    for number, one in enumerate(tools.functions):
        head, tail = syntax.begin + one.name + syntax.arguments, syntax.end
        rules.append(f"call_{number}: {_literal(head)} args_{number} {_literal(tail)}")
        rules.append(f"args_{number}: %json {_literal(_schema_of(one))}")
    return StructuredOutputsParams(grammar="\n".join(rules))


def _schema_of(function: Function) -> dict[str, object]:
    """Return the schema of a call's arguments; only strict functions keep all of it.

    A weak model goes on with arguments of its own invention where a schema does not exclude them.
    """
    parameters = function.parameters or {"type": "object", "properties": {}}
    rules = {"whitespace_pattern": WHITE_SPACE, "lenient": not function.strict}
    if parameters.keys() <= _CLOSED_KEYWORDS and not function.strict:
        parameters = {**parameters, "additionalProperties": False}
    return {**parameters, "x-guidance": rules}


def _literal(value: object) -> str:
    return msgspec.json.encode(value).decode()
