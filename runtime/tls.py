"""TLS contexts of files: a server's certificate, and a client's trust. Made once, at start.

Private keys stay in OpenSSL: nothing here holds or logs them.
"""

import ssl
from pathlib import Path

from baton.protocol.config import RouterConfig
from baton.protocol.errors import ConfigError

_ALPN = ["http/1.1"]


def server_context(router: RouterConfig) -> ssl.SSLContext | None:
    """Return what a router serves https with, or None for http. Raises `ConfigError`.

    Without `ssl_keyfile`, the file of the certificate holds the key too.
    """
    if not router.speaks_tls:
        return None
    cert = Path(router.ssl_certfile)
    key = Path(router.ssl_keyfile or router.ssl_certfile)
    for path, setting in ((cert, "router.ssl_certfile"), (key, "router.ssl_keyfile")):
        try:
            path.open("rb").close()
        except OSError as error:
            text = f"cannot read {path} ({setting}): {error.strerror}"
            raise ConfigError(text) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_ALPN)
    try:
        context.load_cert_chain(cert, key, _refuse_password)
    except (OSError, ValueError) as error:
        files = f"{cert} (router.ssl_certfile) and {key} (router.ssl_keyfile)"
        raise ConfigError(f"{files} {_why_not(error)}") from error
    return context


def renew(context: ssl.SSLContext, router: RouterConfig) -> None:
    """Serve new connections with the certificate that the files have now. Raises `ConfigError`."""
    # A certificate that cannot be used must not replace the old one.
    server_context(router)
    cert = router.ssl_certfile
    context.load_cert_chain(cert, router.ssl_keyfile or cert, _refuse_password)


def client_context(ca_file: str = "") -> ssl.SSLContext:
    """Return a client's context that trusts `ca_file`, or if it is empty, what this machine trusts.

    Raises `ConfigError`.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        text = f"cannot read certificates from {ca_file!r}: {error.strerror or error}"
        raise ConfigError(text) from error
    context.set_alpn_protocols(_ALPN)
    return context


def trusting(context: ssl.SSLContext) -> ssl.SSLContext:
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _why_not(error: OSError | ValueError) -> str:
    if not isinstance(error, ssl.SSLError):
        return f"cannot be used: {error}"
    if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
        return "do not belong together: the key is another certificate's"
    return "are not a certificate and its key in PEM form"


def _refuse_password() -> str:
    raise ValueError(
        "the key is encrypted: name a key without a password that only baton's user can read"
    )
