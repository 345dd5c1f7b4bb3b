"""Keys and certificates that change while the server runs, without a restart and without a pause."""

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from roseinfer.config.options import Config, ServerConfig
from roseinfer.errors import ConfigError
from roseinfer.runtime import file_watch as watched_files
from roseinfer.server import lifecycle
from roseinfer.server.connection.tls import Certificate
from tests.conftest import require_tool
from tests.unit.server.harness import INSTRUMENTS, Listener, ScriptedEngine, engine_info, says, write_checkpoint


def write_certificate(directory: Path, name: str) -> tuple[str, str]:
    """A new self-signed pair of this common name, as `server.tls_cert_file` and `server.tls_key_file`."""
    certificate, key = directory / "tls.crt", directory / "tls.key"
    request = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([require_tool("openssl"), "req", *request, *names, *files], check=True, capture_output=True)
    return str(certificate), str(key)


@asynccontextmanager
async def running(directory: Path, monkeypatch: pytest.MonkeyPatch, **server: Any) -> AsyncIterator[str]:
    """The URL of a whole server over a scripted engine, which looks at its files many times a second."""
    monkeypatch.setattr(watched_files, "WATCH_INTERVAL_S", 0.02)
    engine = ScriptedEngine(says("a"), engine_info(checkpoint_dir=str(write_checkpoint(directory))))
    engine.started.set()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = Config(server=ServerConfig(port=0, ops_port=0, **server))
    task = asyncio.create_task(lifecycle.run(config, engine, Listener(), INSTRUMENTS, url.set_result))
    try:
        yield await url
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_key_is_added_and_another_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first key-one\n")
    async with running(tmp_path, monkeypatch, api_key_file=str(keys)) as url, aiohttp.ClientSession() as session:

        async def status(key: str) -> int:
            async with session.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}) as response:
                return response.status

        assert [await status("key-one"), await status("key-two")] == [200, 401]
        keys.write_text("first key-one\nsecond key-two\n")
        while await status("key-two") != 200:
            pass
        assert await status("key-one") == 200
        keys.write_text("second key-two\n")
        while await status("key-one") != 401:
            pass
        assert await status("key-two") == 200
        keys.write_text("")
        while "cannot be used" not in caplog.text:
            assert await status("key-two") == 200, "a file that was emptied by mistake locks no client out"
    assert "key-two" not in caplog.text


async def test_what_changes_while_the_ports_open_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the first reading and the first look the server loads its certificate and opens its ports."""
    keys = tmp_path / "keys"
    keys.write_text("key-one\n")
    certificate, key = write_certificate(tmp_path, "old")
    listening = lifecycle._listening

    def late(*arguments: Any) -> Any:
        keys.write_text("key-two\n")
        write_certificate(tmp_path, "new")
        return listening(*arguments)

    monkeypatch.setattr(lifecycle, "_listening", late)
    files = {"api_key_file": str(keys), "tls_cert_file": certificate, "tls_key_file": key}
    async with running(tmp_path, monkeypatch, **files) as url, aiohttp.ClientSession() as session:
        headers, status = {"Authorization": "Bearer key-two"}, 0
        while status != 200:
            try:
                trust = ssl.create_default_context(cafile=certificate)
                async with session.get(f"{url}/v1/models", headers=headers, ssl=trust) as response:
                    status = response.status
            except aiohttp.ClientConnectorCertificateError:  # the client trusts the new one already
                pass


async def test_a_certificate_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = write_certificate(tmp_path, "old")
    async with running(tmp_path, monkeypatch, tls_cert_file=certificate, tls_key_file=key) as url:
        assert url.startswith("https://")

        async def name() -> str:
            """The common name that a new connection is shown, after a request on it."""
            trust = ssl.create_default_context(cafile=certificate)
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), ssl=trust)
            writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await reader.readline()
            shown = writer.get_extra_info("peercert")
            writer.transport.abort()
            return str(dict(part[0] for part in shown["subject"])["commonName"])

        assert await name() == "old"
        write_certificate(tmp_path, "new")
        while True:
            try:
                if await name() == "new":
                    break
            except ssl.SSLCertVerificationError:  # the client trusts the new one already
                pass


async def test_a_pair_that_does_not_fit_is_named_and_changes_nothing(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, "old")
    pair = Certificate(Path(certificate), Path(key))
    (tmp_path / "tls.key").write_text("nothing")
    with pytest.raises(ConfigError) as caught:
        pair.read()
    assert caught.value.param == "server.tls_cert_file"


async def test_a_file_that_changes_behind_its_reading_breaks_no_handshake(tmp_path: Path) -> None:
    """Who renews a pair writes two files: the next look may come between them, and the second write at any time."""
    certificate, key = write_certificate(tmp_path, "old")
    trust = ssl.create_default_context(cafile=certificate)
    pair = Certificate(Path(certificate), Path(key))
    read = pair.read()
    write_certificate(tmp_path, "new")
    (tmp_path / "tls.key").write_text("half of a")
    pair.replace(read)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=pair.context)
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=trust)
        writer.transport.abort()


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tls_cert_file": "/nowhere/a"}, "server.tls_key_file"),
        ({"tls_key_file": "/nowhere/a"}, "server.tls_cert_file"),
        ({"tls_cert_file": "/nowhere/a", "tls_key_file": "/nowhere/b"}, "server.tls_cert_file"),
    ],
)
def test_half_a_pair_and_missing_files_are_named(options: dict[str, str], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Certificate.configured(ServerConfig(**options))  # type: ignore[arg-type]
    assert caught.value.param == param
    assert Certificate.configured(ServerConfig()) is None


async def test_a_link_that_is_swapped_is_a_change(tmp_path: Path) -> None:
    """Kubernetes rotates a mounted secret so: the name stays, and what it leads to is another file."""
    for version in ("one", "two"):
        (tmp_path / version).write_text("same size")
    link = tmp_path / "link"
    link.symlink_to("one")
    seen = watched_files.state_of([link])
    link.unlink()
    assert watched_files.state_of([link]) == (None,)
    link.symlink_to("two")
    assert watched_files.state_of([link]) != seen
