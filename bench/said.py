"""What a server itself says of how it was started: its version, its settings, its metrics.

`compare.py` shows it side by side. Nothing here is needed for a measurement: a server that does not
have these pages says nothing, and neither does this.
"""

import json
import ssl
import urllib.request

from baton.bench.client.target import Target, place_of
from baton.bench.parity import Facts, facts_of_json, facts_of_metrics

TIMEOUT_S = 5.0
MAX_BYTES = 4 << 20
# vLLM (with its development endpoints), SGLang, and servers that follow them.
PAGES = ("/version", "/server_info", "/get_server_info")


def facts_said(target: Target) -> Facts:
    facts: Facts = {}
    for page in PAGES:
        try:
            facts |= facts_of_json(json.loads(_get(target, page)))
        except ValueError:
            continue
    return facts | facts_of_metrics(_get(target, "/metrics"))


def _get(target: Target, page: str) -> str:
    """Empty where the server has no such page."""
    place = place_of(target.url)
    scheme = "https" if place.is_tls else "http"
    root = place.base_path.removesuffix("/v1")
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    request = urllib.request.Request(f"{scheme}://{place.authority}{root}{page}", headers=headers)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=_context(target)),
        _Stay(),
    )
    try:
        with opener.open(request, timeout=TIMEOUT_S) as reply:
            content: bytes = reply.read(MAX_BYTES)
    except (OSError, ValueError):
        return ""
    return content.decode(errors="replace")


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows nobody: the key is for this server, and so are the answers."""

    def redirect_request(self, *_: object) -> None:
        return None


def _context(target: Target) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=target.ca_file or None)
    if target.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
