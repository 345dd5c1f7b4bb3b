"""Models are fetched from a hub that breaks off, stalls and damages what it sends; on 127.0.0.1."""

import asyncio
import hashlib
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from huggingface_hub import constants

from roseinfer.errors import ConfigError
from roseinfer.model.weights import downloads
from roseinfer.model.weights.checkpoint import resolve_checkpoint

REPO, COMMIT = "somebody/something", "0123456789abcdef0123456789abcdef01234567"
SHARDS = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * (3 << 20) for n in (1, 2)}
INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
SMALL = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "model.safetensors.index.json": INDEX.encode(),
    "chat_template.jinja": b"x",
    "1_Pooling/config.json": b'{"a": 2}',
    "additional_chat_templates/tool_use.jinja": b"y",
}
UNUSED = {
    "consolidated.safetensors": b"z",
    "pytorch_model.bin": b"z",
    "model.gguf": b"z",
    "onnx/config.json": b"{}",
    "README.md": b"z",
}
SHARD = next(iter(SHARDS))


class Hub:
    """The hub's API as far as fetching needs it, with faults by the name of a file."""

    def __init__(self) -> None:
        self.files = {**SMALL, **SHARDS, **UNUSED}
        self.asked = Counter[str]()  # how often the bytes of each were
        self.ranges: list[str] = []
        self.tokens = set[str | None]()
        self.refusal: tuple[int, str] | None = None  # status, X-Error-Code
        self.cuts = dict[str, list[int]]()  # numbers of bytes after which the connection ends, once each
        self.damages = Counter[str]()  # how many answers have a wrong byte
        self.ignores_ranges = False
        self.stalls = ""
        self.untold = set[str]()
        self.tag = ""  # of every file, in the place of its digest
        self.cdn = ""
        self.app = web.Application()
        self.app.router.add_get("/api/models/{owner}/{name}{rest:.*}", self._api)
        self.app.router.add_get("/{owner}/{name}/resolve/{commit}/{file:.+}", self._resolve)
        self.app.router.add_get("/cdn/{file:.+}", self._content)

    async def _api(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers.get("Authorization"))
        if self.refusal is not None:
            status, code = self.refusal
            return web.Response(status=status, headers={"X-Error-Code": code})
        files = [self._told(name, content) for name, content in self.files.items()]
        if "/tree/" in request.path:
            return web.json_response(
                [{"type": "file", "path": file["rfilename"], "oid": file["blobId"], **file} for file in files]
            )
        siblings = [{key: told for key, told in file.items() if key not in self.untold} for file in files]
        return web.json_response({"id": REPO, "sha": COMMIT, "siblings": siblings})

    def _told(self, name: str, content: bytes) -> dict[str, object]:
        told: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git_digest(content)}
        if name in SHARDS:
            sha256 = hashlib.sha256(content).hexdigest()
            told["lfs"] = {"sha256": sha256, "oid": sha256, "size": len(content), "pointerSize": 1}
        return told

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["file"]
        content = self.files[name]
        etag = hashlib.sha256(content).hexdigest() if name in SHARDS else git_digest(content)
        etag = self.tag or etag
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        if name in SHARDS:
            return web.Response(
                status=302, headers={**headers, "X-Linked-Etag": f'"{etag}"', "Location": f"{self.cdn}/{name}"}
            )
        if request.method == "HEAD":
            return web.Response(headers={**headers, "Content-Length": str(len(content))})
        return await self._content(request)

    async def _content(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["file"]
        assert not (name in SHARDS and request.headers.get("Authorization")), "the CDN is another host"
        self.asked[name] += 1
        content, start = self.files[name], 0
        if (wanted := request.headers.get("Range")) and not self.ignores_ranges:
            self.ranges.append(wanted)
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])  # type: ignore[index]
        answer = web.StreamResponse(status=206 if start else 200)
        answer.content_length = len(content) - start
        await answer.prepare(request)
        if self.damages[name]:
            self.damages[name] -= 1
            content = content[:-1] + b"?"
        end = self.cuts[name].pop(0) if self.cuts.get(name) else len(content)
        await answer.write(content[start:end])
        if name == self.stalls:
            await asyncio.sleep(30)
        if end < len(content):
            assert request.transport is not None
            request.transport.close()
        return answer


def git_digest(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Hub]:
    fake = Hub()
    async with TestServer(fake.app, host="127.0.0.1") as server:
        address = str(server.make_url("")).rstrip("/")
        fake.cdn = f"http://localhost:{server.port}/cdn"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
        monkeypatch.setattr(downloads, "_RETRY_S", 0.01)
        yield fake


async def fetched(revision: str | None = None, *, has_weights: bool = True) -> Path:
    return await asyncio.to_thread(resolve_checkpoint, REPO, revision, has_weights=has_weights)


async def refusal(revision: str | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        await fetched(revision)
    return caught.value


def content_of(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


async def test_only_what_is_needed_is_asked_for_and_once(served: Hub) -> None:
    assert content_of(await fetched(has_weights=False)) == SMALL
    assert content_of(await fetched()) == SMALL | SHARDS
    assert content_of(await fetched()) == SMALL | SHARDS
    assert served.asked == dict.fromkeys(SMALL | SHARDS, 1)


async def test_without_an_index_one_file_has_the_weights(served: Hub) -> None:
    del served.files["model.safetensors.index.json"]
    served.files["model.safetensors"] = b"w"
    assert {name for name in content_of(await fetched()) if name.endswith("safetensors")} == {"model.safetensors"}


async def test_a_connection_that_ends_is_resumed_where_it_ended(served: Hub) -> None:
    served.cuts = {SHARD: [1 << 20, 2 << 20]}
    assert content_of(await fetched()) == SMALL | SHARDS
    assert len(served.ranges) == 2
    assert served.asked[SHARD] == 3


def write_partial(directory: Path) -> None:
    """What a fetch leaves that was killed after 1,000 bytes of a shard."""
    blobs = directory / "cache" / "models--somebody--something" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(SHARDS[SHARD]).hexdigest()}.partial").write_bytes(SHARDS[SHARD][:1000])


async def test_a_fetch_that_was_killed_is_resumed(served: Hub, tmp_path: Path) -> None:
    write_partial(tmp_path)
    assert content_of(await fetched()) == SMALL | SHARDS
    assert served.ranges == ["bytes=1000-"]


async def test_a_server_that_sends_all_of_it_again(served: Hub) -> None:
    served.cuts, served.ignores_ranges = {SHARD: [1 << 20]}, True
    assert content_of(await fetched()) == SMALL | SHARDS


async def test_a_server_that_never_gets_past_some_byte(served: Hub) -> None:
    served.cuts, served.ignores_ranges = {SHARD: [2 << 20, 1 << 20] * 20}, True
    assert "could not be fetched" in (await refusal()).message
    assert served.asked[SHARD] < 10


@pytest.mark.parametrize("name", [SHARD, "config.json"])
async def test_what_arrives_damaged_is_fetched_again(served: Hub, caplog: pytest.LogCaptureFixture, name: str) -> None:
    served.damages[name] = 1
    assert content_of(await fetched()) == SMALL | SHARDS
    assert served.asked[name] == 2
    assert f"{name} of {REPO} is fetched again: its digest is " in caplog.text


async def test_what_arrives_damaged_twice_is_refused(served: Hub) -> None:
    served.damages[SHARD] = 2
    error = await refusal()
    assert error.message.startswith(f"{SHARD} of {REPO} arrived damaged twice: its digest is ")
    assert error.param == "model.path"
    assert content_of(await fetched()) == SMALL | SHARDS, "nothing damaged stays"


async def test_a_hub_that_stalls_is_not_waited_for_without_end(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "_NUM_TRIES", 2)
    served.stalls, served.cuts = SHARD, {SHARD: [1000, 1000, 1000]}
    assert (await refusal()).message.startswith(f"{REPO} could not be fetched from Hugging Face: {SHARD}: ")


@pytest.mark.parametrize(
    ("refused", "told", "param"),
    [
        ((401, "RepoNotFound"), "no model of this name on Hugging Face; one that is private needs HF_TOKEN", "path"),
        ((404, "RepoNotFound"), "no model of this name on Hugging Face", "path"),
        ((403, "GatedRepo"), "needs permission of its owner; set HF_TOKEN", "path"),
        ((404, "RevisionNotFound"), f"{REPO} has no revision v9", "revision"),
        ((500, ""), "could not be fetched from Hugging Face: ", "path"),
    ],
)
async def test_what_the_hub_refuses(served: Hub, refused: tuple[int, str], told: str, param: str) -> None:
    served.refusal = refused
    error = await refusal("v9")
    assert told in error.message
    assert "\n" not in error.message
    assert error.param == f"model.{param}"


async def test_weights_of_another_format_are_not_fetched(served: Hub) -> None:
    for name in [*SHARDS, "consolidated.safetensors"]:
        del served.files[name]
    assert "has no safetensors file; other formats" in (await refusal()).message
    assert not set(UNUSED) & set(served.asked)


async def test_a_copy_serves_while_the_hub_does_not(
    served: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = await fetched()
    served.refusal = 503, ""
    assert await fetched() == here
    assert "is taken from the cache, since Hugging Face says: " in caplog.text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert await fetched() == here


async def test_a_hub_that_is_switched_off_and_no_copy(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "switched off (HF_HUB_OFFLINE), and its cache has no copy" in (await refusal()).message


@pytest.mark.parametrize("untold", [{"size", "lfs"}, {"blobId", "lfs"}])
async def test_a_hub_without_sizes_or_digests(served: Hub, untold: set[str]) -> None:
    served.untold = untold
    assert content_of(await fetched()) == SMALL | SHARDS


@pytest.mark.parametrize("untold", [{"size", "lfs"}, {"blobId", "lfs"}])
async def test_what_a_list_does_not_tell_is_asked_of_each_file(served: Hub, tmp_path: Path, untold: set[str]) -> None:
    """So it is resumed, also by another process, and compared."""
    served.untold, served.damages[SHARD] = untold, 1
    write_partial(tmp_path)
    assert content_of(await fetched()) == SMALL | SHARDS
    assert served.ranges == ["bytes=1000-"]
    assert served.asked[SHARD] == 2


async def test_a_tag_that_is_no_digest_names_the_file(served: Hub, tmp_path: Path) -> None:
    served.files = {"config.json": b" " * (2 << 20) + b"{}"}
    served.untold, served.tag, served.cuts = {"blobId", "lfs"}, "v1-abc", {"config.json": [1 << 20]}
    assert content_of(await fetched(has_weights=False)) == served.files
    assert served.ranges == [f"bytes={1 << 20}-"]
    assert (tmp_path / "cache" / "models--somebody--something" / "blobs" / "v1-abc").is_file()


async def test_the_log_shows_the_progress(
    served: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(downloads, "_LOG_EVERY_S", 0.0)
    caplog.set_level(logging.INFO, downloads.__name__)
    await fetched()
    lines = re.findall(rf"{REPO}: ([\d.]+) of ([\d.]+) MB are here, at [\d.]+ MB/s", caplog.text)
    assert len(lines) > 2
    assert lines[-1] == ("6.3", "6.3")


async def test_the_environment_says_where_the_hub_is_and_who_asks(served: Hub, tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": constants.ENDPOINT, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_secret"}
    code = f"from roseinfer.model.weights.hub import fetch; print(fetch({REPO!r}, 'v1', has_weights=False))"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=os.environ | environment, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert content_of(Path(output.decode().strip())) == SMALL
    assert Path(output.decode().strip()).is_relative_to(tmp_path)
    assert served.tokens == {"Bearer hf_secret"}
