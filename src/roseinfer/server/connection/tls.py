"""Loads the certificate and the key of the API port, and again when their files change."""

import ssl
from pathlib import Path

from roseinfer.config.options import ServerConfig
from roseinfer.errors import ConfigError
from roseinfer.runtime.file_watch import WatchedFiles


class Certificate:
    """A TLS context that can be replaced: later connections get the new one."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.paths = (certificate, key)
        self.files = WatchedFiles(self.paths)
        self.context = self.read()

    @classmethod
    def configured(cls, config: ServerConfig) -> "Certificate | None":
        """The configured certificate, or None. Raises ConfigError for files that are no certificate and its key."""
        if not config.tls_cert_file and not config.tls_key_file:
            return None
        if not config.tls_cert_file or not config.tls_key_file:
            missing = "tls_key_file" if config.tls_cert_file else "tls_cert_file"
            raise ConfigError("A certificate needs its key, and a key its certificate.", param=f"server.{missing}")
        return cls(Path(config.tls_cert_file), Path(config.tls_key_file))

    def read(self) -> ssl.SSLContext:
        """The context of what the files hold now, for `replace`. Not for the event loop. Raises ConfigError."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(*self.paths, password=_no_password)
        except OSError as error:  # ssl.SSLError is one
            reason = error.strerror or str(error)
            message = f"{self.paths[0]} and {self.paths[1]} are not a certificate and its key: {reason}."
            raise ConfigError(message, param="server.tls_cert_file") from None
        return context

    def replace(self, context: ssl.SSLContext) -> None:
        """Use a context that was read; the files may already hold something else, half written."""
        self.context = context


def _no_password() -> str:
    """OpenSSL asks the terminal for a password unless it gets this."""
    raise ssl.SSLError("the key is encrypted, which is not supported")
