"""TLS by files: a server's certificate, which may be replaced under load, and a client's trust.

The router makes one `ServerCertificate`, and the command line makes one before anything is started,
so that a wrong file is one line. `chat`, `bench` and commands that wait for a router connect with
`client_context`. Private keys stay in OpenSSL: nothing here holds or logs them.
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
    """A certificate and its key. Serve with `context`, and call `look` every `LOOK_S` seconds.

    New connections get the latest certificate; those that are open keep theirs. Files that become
    unreadable or wrong leave the last good certificate in use.
    """

    def __init__(self, cert: str, key: str) -> None:
        """Read the files; an empty `key` is in the file `cert`. Raises `ConfigError`."""
        self._cert, self._key = Path(cert), Path(key or cert)
        self._seen = self._loaded = self._states()
        self._latest = self.context = self._read()
        # OpenSSL calls this for each connection, whether or not the client names a host.
        self.context.sni_callback = self._give_latest

    def look(self) -> None:
        """Read the files again once they have changed and have then rested for one look."""
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
    """Return the certificate that a router serves with, None without; raises `ConfigError`."""
    return ServerCertificate(router.tls_cert, router.tls_key) if router.speaks_tls else None


def client_context(ca_file: str = "") -> ssl.SSLContext:
    """Return a client's context, which trusts `ca_file`, else what this machine trusts.

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
    """Let a client trust any certificate, and return its context."""
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _refuse_password() -> str:
    raise ValueError("the key is encrypted: give one without a password, readable by baton alone")
