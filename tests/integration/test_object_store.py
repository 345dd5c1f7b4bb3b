"""Models are fetched from S3, as moto's server speaks it, through a proxy that breaks off and damages what it sends."""

import asyncio
import hashlib
import logging
import os
import sys
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from huggingface_hub import constants

from roseinfer.bench.load.launcher import free_port
from roseinfer.errors import ConfigError
from roseinfer.model.weights import downloads, object_store
from roseinfer.model.weights.checkpoint import resolve_checkpoint
from tests.integration.object_store import Store, running_store

BUCKET, FOLDER = "models", "team/something"
ADDRESS = f"s3://{BUCKET}/{FOLDER}"
SHARD = "model.safetensors"
NEEDED = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "empty.txt": b"", SHARD: bytes(range(256)) * (3 << 12)}
UNUSED = {"pytorch_model.bin": b"z", "README.md": b"z", "onnx/config.json": b"{}"}


@pytest.fixture(scope="module")
def moto() -> Iterator[Store]:
    with running_store() as store:
        yield store


class Proxy:
    """What stands between, with faults by the name of a file."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.asked = Counter[str]()  # how often the bytes of each were
        self.ranges: list[str] = []
        self.cuts = dict[str, list[int]]()  # numbers of bytes after which the connection ends, once each
        self.damages = Counter[str]()  # how many answers have a wrong byte
        self.statuses: list[int] = []  # of the next answers to requests for bytes
        self.of_parts: int | None = None  # the status of a question about a part; 200 is about the whole, as in R2
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self._pass)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        raw_path = request.raw_path
        if self.of_parts is not None and "partNumber" in request.query:
            if self.of_parts != 200:
                return web.Response(status=self.of_parts)
            raw_path = raw_path.partition("?")[0]
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(
                request.method,
                f"{self.store.address}{raw_path}",
                headers=request.headers,
                data=await request.read(),
            ) as found,
        ):
            body = await found.read()
        headers = {key: value for key, value in found.headers.items() if key.lower() not in DROPPED}
        name = request.path.removeprefix(f"/{BUCKET}/{FOLDER}/")
        if request.method != "GET" or name not in NEEDED:
            return web.Response(status=found.status, headers=headers | length_of(found), body=body)
        self.asked[name] += 1
        if "Range" in request.headers:
            self.ranges.append(request.headers["Range"])
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        if self.damages[name]:
            self.damages[name] -= 1
            body = body[:-1] + b"?"
        answer = web.StreamResponse(status=found.status, headers=headers)
        answer.content_length = len(body)
        await answer.prepare(request)
        end = self.cuts[name].pop(0) if self.cuts.get(name) else len(body)
        await answer.write(body[:end])
        if end < len(body):
            assert request.transport is not None
            request.transport.close()
        return answer


DROPPED = {"content-length", "transfer-encoding", "connection", "date", "server"}


def length_of(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {"Content-Length": answer.headers["Content-Length"]} if answer.method == "HEAD" else {}


@pytest.fixture
async def store(moto: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Proxy]:
    proxy = Proxy(moto)
    async with TestServer(proxy.app, host="127.0.0.1") as server:
        for name, value in moto.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", str(server.make_url("")).rstrip("/"))
        monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(downloads, "_RETRY_S", 0.01)
        await asyncio.to_thread(fill, moto, NEEDED | UNUSED)
        yield proxy


def fill(store: Store, files: dict[str, bytes]) -> None:
    store.fill(BUCKET, {f"{FOLDER}/{name}": content for name, content in files.items()})


async def fetched(address: str = ADDRESS, *, has_weights: bool = True) -> Path:
    return await asyncio.to_thread(resolve_checkpoint, address, has_weights=has_weights)


async def refusal(address: str = ADDRESS) -> str:
    with pytest.raises(ConfigError) as caught:
        await fetched(address)
    assert caught.value.param == "model.path"
    assert "\n" not in caught.value.message
    return caught.value.message


def content_of(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


async def test_only_what_is_needed_is_asked_for_and_once(store: Proxy) -> None:
    small = {name: content for name, content in NEEDED.items() if name != SHARD}
    assert content_of(await fetched(has_weights=False)) == small
    assert content_of(await fetched()) == NEEDED
    assert content_of(await fetched(f"{ADDRESS}/")) == NEEDED, "a slash behind it is the same folder"
    assert store.asked[SHARD] == 2, "of another address"
    assert store.asked["config.json"] == 2


async def test_a_connection_that_ends_is_resumed_where_it_ended(store: Proxy) -> None:
    store.cuts = {SHARD: [1 << 20, 1 << 20]}
    assert content_of(await fetched()) == NEEDED
    assert store.ranges == [f"bytes={1 << 20}-", f"bytes={2 << 20}-"]


async def test_a_fetch_that_was_killed_is_resumed(store: Proxy, tmp_path: Path) -> None:
    blobs = (await fetched()).parent / "blobs"
    (blob,) = [path for path in blobs.iterdir() if path.stat().st_size == len(NEEDED[SHARD])]
    blob.rename(f"{blob}.partial")
    os.truncate(f"{blob}.partial", 1000)
    assert content_of(await fetched()) == NEEDED
    assert store.ranges == ["bytes=1000-"]


@pytest.mark.parametrize("num_parts", [1, 2, 3])
async def test_what_arrives_damaged_is_fetched_again(
    store: Proxy, caplog: pytest.LogCaptureFixture, num_parts: int
) -> None:
    """Also where the store's tag is made of the digests of its parts: the last one shorter, or as long as the first."""
    monkeyed = NEEDED[SHARD] * 4 if num_parts > 1 else NEEDED[SHARD]
    part = 5 << 20
    content = monkeyed[: part * (num_parts - 1) + (part if num_parts == 3 else 1000)]
    await asyncio.to_thread(upload, store.store, [content[at : at + part] for at in range(0, len(content), part)])
    store.damages[SHARD] = 1
    assert (await fetched() / SHARD).read_bytes() == content
    assert store.asked[SHARD] == 2
    assert f"{SHARD} of {ADDRESS} is fetched again: its digest is " in caplog.text
    if num_parts > 1:
        assert f"-{num_parts}" in caplog.text


@pytest.mark.parametrize("status", [200, 400, 501])
async def test_a_store_that_says_nothing_of_parts_has_its_sizes_compared(store: Proxy, status: int) -> None:
    """Cloudflare's knows no `partNumber`: what it serves is not damaged for that."""
    content = NEEDED[SHARD] * 2
    await asyncio.to_thread(upload, store.store, [content[: 5 << 20], content[5 << 20 :]])
    store.of_parts = status
    assert (await fetched() / SHARD).read_bytes() == content
    assert store.asked[SHARD] == 1


def upload(store: Store, parts: list[bytes]) -> None:
    s3, where = store.client(), {"Bucket": BUCKET, "Key": f"{FOLDER}/{SHARD}"}
    upload_id = s3.create_multipart_upload(**where)["UploadId"]
    done = [
        {"PartNumber": n, "ETag": s3.upload_part(**where, UploadId=upload_id, PartNumber=n, Body=part)["ETag"]}
        for n, part in enumerate(parts, 1)
    ]
    s3.complete_multipart_upload(**where, UploadId=upload_id, MultipartUpload={"Parts": done})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ChecksumAlgorithm": "SHA256"}, hashlib.sha256(NEEDED[SHARD]).hexdigest()),
        ({"ChecksumAlgorithm": "CRC32", "ServerSideEncryption": "aws:kms"}, f"{zlib.crc32(NEEDED[SHARD]):08x}"),
    ],
)
async def test_a_checksum_that_was_stored_is_compared(
    store: Proxy, caplog: pytest.LogCaptureFixture, options: dict[str, str], expected: str
) -> None:
    """With KMS the tag is no digest."""
    await asyncio.to_thread(put, store.store, options)
    store.damages[SHARD] = 1
    assert content_of(await fetched()) == NEEDED
    assert f"instead of {expected}" in caplog.text


def put(store: Store, options: dict[str, str]) -> None:
    store.client().put_object(Bucket=BUCKET, Key=f"{FOLDER}/{SHARD}", Body=NEEDED[SHARD], **options)


async def test_what_arrives_damaged_twice_is_refused(store: Proxy) -> None:
    store.damages[SHARD] = 2
    assert (await refusal()).startswith(f"{SHARD} of {ADDRESS} arrived damaged twice: its digest is ")
    assert content_of(await fetched()) == NEEDED, "nothing damaged stays"


async def test_a_store_that_is_busy_is_asked_again(store: Proxy) -> None:
    store.statuses = [503]
    assert content_of(await fetched()) == NEEDED


async def test_googles_store_is_asked_in_the_same_way(store: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_GOOGLE", os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert content_of(await fetched(f"gs://{BUCKET}/{FOLDER}")) == NEEDED


async def test_what_has_changed_is_fetched_alone(store: Proxy) -> None:
    await fetched()
    changed = {name: content for name, content in NEEDED.items() if name != "empty.txt"} | {"config.json": b'{"b": 1}'}
    await asyncio.to_thread(fill, store.store, changed)
    assert content_of(await fetched()) == changed
    assert (store.asked[SHARD], store.asked["config.json"]) == (1, 2)


async def test_a_copy_serves_while_the_store_does_not(
    store: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = await fetched()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    assert await fetched() == here
    assert "the copy that is here serves" in caplog.text
    assert (await refusal("s3://models/other")).startswith("s3://models/other could not be fetched: Could not connect")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert await fetched() == here
    assert "HF_HUB_OFFLINE is set, and no copy" in await refusal("s3://models/other")


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("s3://models", "s3://models is no address such as s3://BUCKET/FOLDER."),
        ("s3:///folder", "is no address such as"),
        ("s3://models/nothing", "There is nothing at s3://models/nothing."),
        ("s3://nowhere/folder", "could not be fetched: An error occurred (NoSuchBucket)"),
    ],
)
async def test_what_is_not_there_is_refused_in_a_sentence(store: Proxy, address: str, told: str) -> None:
    assert told in await refusal(address)


async def test_without_the_extra_it_says_so(store: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore", None)
    monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
    assert await refusal() == f"{ADDRESS} needs the extra s3: pip install 'roseinfer[s3]'."


async def test_without_keys_it_says_so(store: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert "Unable to locate credentials" in await refusal()


async def test_the_log_shows_the_progress(
    store: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(downloads, "_LOG_EVERY_S", 0.0)
    caplog.set_level(logging.INFO, downloads.__name__)
    await fetched()
    assert f"{ADDRESS}: 3.1 of 3.1 MB are here" in caplog.text
