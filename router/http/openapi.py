"""The description of the HTTP API that /openapi.json serves, made from the types of the bodies."""

from functools import cache

import msgspec

from baton.protocol import VERSION
from baton.router.http.message_body import CountBody, MessageBody
from baton.router.http.response_body import ResponseBody
from baton.router.http.schema import ChatBody, CompletionBody
from baton.router.http.tokens import DetokenizeBody, TokenizeBody

_POSTS: dict[str, tuple[type, str]] = {
    "/v1/completions": (CompletionBody, "Continue one or several prompts."),
    "/v1/chat/completions": (ChatBody, "Answer the last turn of a chat."),
    "/v1/responses": (ResponseBody, "Answer a list of items, in OpenAI's newer form."),
    "/v1/messages": (MessageBody, "Answer the last turn of a chat, in Anthropic's form."),
    "/v1/messages/count_tokens": (CountBody, "Return the number of a prompt's tokens."),
    "/tokenize": (TokenizeBody, "Return the token ids of a prompt or a chat."),
    "/detokenize": (DetokenizeBody, "Return the text of token ids."),
}
_GETS: dict[str, str] = {
    "/v1/models": "List the served model.",
    "/v1/models/{name}": "Describe the served model.",
    "/v1/streams/{id}": "Resume a stream after the event that the header Last-Event-ID names.",
    "/tokenizer_info": "Return the tokenizer's settings.",
    "/health": "Return the state of the router and of its nodes; 503 if it can serve nothing.",
    "/live": "Return 200 while the process runs.",
    "/ping": "The same as /health.",
    "/load": "Return the number of requests under way.",
    "/metrics": "Return metrics in Prometheus' text format.",
    "/version": "Return baton's version.",
}


class ErrorBody(msgspec.Struct):
    """Why a request failed."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    error: ErrorBody


@cache
def document() -> bytes:
    """Return the description, in OpenAPI 3.1 as JSON."""
    bodies = [body for body, _ in _POSTS.values()]
    schemas, components = msgspec.json.schema_components(
        [*bodies, ErrorAnswer],
        ref_template="#/components/schemas/{name}",
        schema_hook=lambda _: {"description": "any value"},
    )
    *body_schemas, error = schemas
    failed = {"description": "an error", "content": _json(error)}
    responses = {"200": {"description": "the answer"}, "4XX": failed, "5XX": failed}
    paths: dict[str, dict[str, object]] = {}
    for (path, (_, summary)), schema in zip(_POSTS.items(), body_schemas, strict=True):
        body = {"required": True, "content": _json(schema)}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": responses}}
    for path, summary in _GETS.items():
        get: dict[str, object] = {"summary": summary, "responses": responses}
        if "{" in path:
            name = path.partition("{")[2].removesuffix("}")
            place = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            get["parameters"] = [place]
        paths[path] = {"get": get}
    info = {"title": "baton", "version": VERSION}
    described = {"openapi": "3.1.0", "info": info, "paths": paths}
    return msgspec.json.encode({**described, "components": {"schemas": components}})


def _json(schema: dict[str, object]) -> dict[str, object]:
    return {"application/json": {"schema": schema}}
