"""Requests to an HTTP server of baton, as any client writes them."""

import json
import urllib.request
from http.client import HTTPResponse

from tests.support.waiting import TIMEOUT_S


def post(
    url: str, body: dict[str, object], path: str = "/v1/completions", **headers: str
) -> urllib.request.Request:
    headers = {"Content-Type": "application/json", **headers}
    return urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)


def ask(url: str, body: dict[str, object], **headers: str) -> HTTPResponse:
    """Return the answer to a completion, whole or as it comes."""
    reply: HTTPResponse = urllib.request.urlopen(
        post(url, body, **headers), timeout=TIMEOUT_S
    )
    return reply


def answers(url: str) -> bool:
    """Return whether a GET of this URL is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=10.0) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
