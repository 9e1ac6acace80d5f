"""TLS by files: a server's certificate, which may be replaced under load, and a client's trust.

The router makes one `ServerCertificate`. The command line makes one before it starts anything, so
that a wrong file ends the command with one line. `chat`, `bench` and commands that wait for a
router connect with `client_context`. Private keys stay in OpenSSL: nothing here holds or logs them.
"""

import ssl
from pathlib import Path

from baton.protocol.config import RouterConfig
from baton.protocol.errors import ConfigError
from baton.runtime.file_state import FileState, state_of
from baton.runtime.log import logger

LOOK_S = 1.0  # between two looks at the files
_ALPN = ["http/1.1"]

log = logger("router")


class ServerCertificate:
    """A certificate and its key. The owner serves with `context` and calls `look` every `LOOK_S`.

    New connections get the latest certificate; open connections keep theirs. If the files become
    unreadable or wrong, the last good certificate stays in use.
    """

    def __init__(self, cert: str, key: str) -> None:
        """Read the files. If `key` is empty, `cert` holds the key. Raises `ConfigError`."""
        self._cert, self._key = Path(cert), Path(key or cert)
        self._seen = self._loaded = self._states()
        self._latest = self.context = self._read()
        # OpenSSL calls this for each connection, whether or not the client names a host.
        self.context.sni_callback = self._give_latest

    def look(self) -> None:
        """Read changed files again once they have stayed the same between two looks."""
        states = self._states()
        is_resting, self._seen = states == self._seen, states
        if is_resting and states != self._loaded:
            self.read_again()

    def read_again(self) -> None:
        """Read the files now, changed or not."""
        self._seen = self._loaded = self._states()
        try:
            self._latest = self._read()
        except ConfigError as error:
            log.warning("the certificate stays as it was", reason=error.message)
        else:
            log.info("certificate read again", file=str(self._cert))

    def _give_latest(
        self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._latest

    def _states(self) -> tuple[FileState, FileState]:
        return state_of(self._cert), state_of(self._key)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(_ALPN)
        for path, setting in ((self._cert, "router.tls_cert"), (self._key, "router.tls_key")):
            try:
                path.open("rb").close()
            except OSError as error:
                text = f"cannot read {path} ({setting}): {error.strerror}"
                raise ConfigError(text) from error
        try:
            context.load_cert_chain(self._cert, self._key, _refuse_password)
        except (OSError, ValueError) as error:
            raise ConfigError(self._why_not(error)) from error
        return context

    def _why_not(self, error: OSError | ValueError) -> str:
        files = f"{self._cert} (router.tls_cert) and {self._key} (router.tls_key)"
        if not isinstance(error, ssl.SSLError):
            return f"{files} cannot be used: {error}"
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            return f"{files} do not belong together: the key is another certificate's"
        return f"{files} are not a certificate and its key in PEM form"


def certificate_of(router: RouterConfig) -> ServerCertificate | None:
    """Return the certificate that a router serves with, or None. Raises `ConfigError`."""
    return ServerCertificate(router.tls_cert, router.tls_key) if router.speaks_tls else None


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
    """Make a client's context trust any certificate, and return it."""
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _refuse_password() -> str:
    raise ValueError(
        "the key is encrypted: name a key without a password that only baton's user can read"
    )
