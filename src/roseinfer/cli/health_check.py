"""The image's health check: asks a running `roseinfer serve` whether it is ready, wherever it was made to listen.

`python -m roseinfer.cli.health_check PID` ends with 0 when that server is ready, with 1 when it is not, and with 2 when
the process is no server. It reads flags, environment and file as the server read them. It runs every few seconds beside
the server, so it imports nothing heavy.
"""

import http.client
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from roseinfer.config.flags import Parser, add_config_flags, values_given
from roseinfer.config.options import Config, ServerConfig
from roseinfer.config.sources import build, gather
from roseinfer.errors import ConfigError

EXIT_NOT_READY = 1
EXIT_USAGE = 2
TIMEOUT_S = 2.0
_LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - a server on all addresses has this one


def main(argv: Sequence[str]) -> int:
    """Return the exit code; one line on standard error says why it is not 0."""
    if len(argv) != 1 or not argv[0].isdecimal():
        print("usage: python -m roseinfer.cli.health_check PID", file=sys.stderr)
        return EXIT_USAGE
    try:
        reason = refusal(configuration_of(int(argv[0])).server)
    except ConfigError as error:
        where = f"{error.param}: " if error.param else ""
        print(f"roseinfer.cli.health_check: {where}{error.message}", file=sys.stderr)
        return EXIT_USAGE
    if reason:
        print(f"not ready: {reason}", file=sys.stderr)
    return EXIT_NOT_READY if reason else 0


def configuration_of(pid: int) -> Config:
    """The configuration that a server process read. Raises ConfigError if it is no server."""
    process = Path(f"/proc/{pid}")
    try:
        words, variables = _strings(process / "cmdline"), _strings(process / "environ")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", param=f"process {pid}") from None
    if "serve" not in words:
        raise ConfigError("is no `roseinfer serve`", param=f"process {pid}")
    parser = Parser(prog="roseinfer serve")
    parser.set_defaults(parser=parser)
    add_config_flags(parser)
    parsed = parser.parse_args(words[words.index("serve") + 1 :])
    environment = dict(variable.partition("=")[::2] for variable in variables)
    return build(gather(values_given(parsed), environment, parsed.config)).config


def _strings(file: Path) -> list[str]:
    """The strings of a file in /proc, each of which ends with a zero byte."""
    return file.read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1]


def refusal(server: ServerConfig) -> str:
    """Why a server is not ready; empty when it is. Raises ConfigError when its port is not known.

    It asks the operations port, which never speaks TLS, or the API port where there is no operations port.
    """
    host, port = (server.ops_host, server.ops_port) if server.ops_port else (server.host, server.port)
    if not port:
        raise ConfigError("is 0, so the server took a free port that cannot be known here", param="server.port")
    address = _LOOPBACK.get(host, host)
    connection = http.client.HTTPConnection(address, port, timeout=TIMEOUT_S)
    if not server.ops_port and server.tls_cert_file:
        context = ssl.create_default_context()
        context.check_hostname = False  # the certificate is for the name that clients use
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(address, port, timeout=TIMEOUT_S, context=context)
    try:
        connection.request("GET", "/readyz")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"{address}:{port}: {str(error) or type(error).__name__}"
    finally:
        connection.close()
    return "" if status == http.HTTPStatus.OK else f"{address}:{port} answers {status}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
