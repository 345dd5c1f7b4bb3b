"""`/debug/*` of the loopback to who names no host at all."""

import asyncio
import json

import pytest

from tests.integration.test_http_debug import operations


@pytest.mark.parametrize(
    "host", [b"127.0.0.1:abc", b"localhost:99999999", b"\xff\xfe", b"x@127.0.0.1:1:2", b"[127.0.0.1]:x", b""]
)
async def test_a_host_that_is_none_is_not_of_the_loopback(host: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with operations() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port.url.rpartition(":")[2]))
        writer.write(b"GET /debug/steps HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % host)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    error = json.loads(body)["error"]
    assert (int(head.split()[1]), error["code"], error["param"]) == (403, "cross_site", "Host")
    assert not [record for record in caplog.records if record.exc_info]
