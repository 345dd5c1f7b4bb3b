"""A stand-in for llm-d's endpoint picker: scores replicas as its plugins do, and answers nginx with the best one.

    python -m benchmarks.picker --port PORT --replica URL,EVENTS,REPLAY --replica …

In a cluster the gateway asks the picker with the request's body, and then carries the stream itself. Here nginx sends
the body, and the answer names the location to go to (`X-Accel-Redirect`). Plugins and weights are read from the
configuration that the chart gives to llm-d's picker, and the scores are those of its sources as of August 2026:

    prefix-cache-scorer           the share of the prompt's full blocks, from its first on, that the replica holds
    queue-scorer                  (longest queue - its own) / (longest - shortest), or 1 where all are alike
    kv-cache-utilization-scorer   1 - the use of its KV cache

The replica with the highest sum gets the request, by chance among equals. Queues and use come from `/metrics/load`
under vLLM's names, blocks from the engine's events over ZeroMQ. Keys of blocks are the picker's own, chained over token
ids and the salt, so nothing depends on how the engine hashes. For two seconds the picker believes that a replica
holds what it was just sent. Replicas are as given at the start, and are not restarted.
"""

import argparse
import asyncio
import hashlib
import random
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import yaml
import zmq
import zmq.asyncio
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.machine import ROOT

CONFIGURATION = ROOT / "deploy" / "helm" / "roseinfer" / "files" / "picker-precise.yaml"
RENDERED = ("/v1/completions", "/v1/chat/completions")
BELIEF_S = 2.0  # llm-d's speculativeTTL
SCRAPE_S = 0.5
_WAITING, _USE = "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"


def weights() -> dict[str, float]:
    """Plugin -> weight, of the chart's configuration."""
    (profile,) = yaml.safe_load(CONFIGURATION.read_text())["schedulingProfiles"]
    return {plugin["pluginRef"]: plugin["weight"] for plugin in profile["plugins"] if "weight" in plugin}


def block_keys(token_ids: Sequence[int], block_size: int, parent: bytes, salt: str = "") -> list[bytes]:
    """A key for each full block, of its tokens and all before them; `parent` is that of the block before the first."""
    keys = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = array("I", token_ids[start : start + block_size]).tobytes()
        taint = b"" if start else salt.encode()
        keys.append(parent := hashlib.blake2b(parent + tokens + taint, digest_size=16).digest())
    return keys


class Index:
    """Which blocks a replica holds, as its events say."""

    def __init__(self) -> None:
        self.block_size = 0  # not known before the first event
        self._keys: dict[int, bytes] = {}  # by the engine's hash
        self._held: Counter[bytes] = Counter()  # two hashes may have one key
        self._believed: dict[bytes, float] = {}  # until when

    def apply(self, event: Sequence[Any]) -> None:
        match event:
            case ["AllBlocksCleared"]:
                self._keys.clear()
                self._held.clear()
            case ["BlockRemoved", hashes, *_]:
                for engine_hash in hashes:
                    if (key := self._keys.pop(engine_hash, None)) is not None:
                        self._held[key] -= 1
            case ["BlockStored", hashes, parent, token_ids, block_size, _, _, _, extra_keys, *_]:
                self.block_size = block_size
                salt = extra_keys[0][0] if extra_keys and extra_keys[0] else ""
                before = b"" if parent is None else self._keys.get(parent)
                if before is not None:  # a block whose beginning is not known says nothing
                    keys = block_keys(token_ids, block_size, before, salt)
                    self._keys.update(zip(hashes, keys, strict=True))
                    self._held.update(keys)

    def believe(self, keys: Iterable[bytes], now: float) -> None:
        """These blocks will be there in a moment."""
        for key in keys:
            self._believed.pop(key, None)
            self._believed[key] = now + BELIEF_S
        for key in [key for key, until in self._believed.items() if until < now]:
            del self._believed[key]

    def num_held(self, keys: Iterable[bytes], now: float) -> int:
        """Of a prompt's blocks, how many it holds from the first on."""
        held = 0
        for key in keys:
            if not self._held[key] and (key not in self._believed or self._believed[key] < now):
                break
            held += 1
        return held


@dataclass
class Replica:
    """One server, and what the picker knows of it."""

    url: str
    events: str
    replay: str
    index: Index = field(default_factory=Index)
    num_waiting: float = 0.0
    kv_use: float = 0.0
    num_picked: int = 0  # for prompts
    next_number: int = 0  # of its events

    async def follow_events(self, context: zmq.asyncio.Context, started: asyncio.Event) -> None:
        """Apply events in their order; those that were missed are asked for again."""
        with context.socket(zmq.SUB) as events:
            events.subscribe(b"kv@")
            events.connect(self.events)
            await self._ask_again(context)
            started.set()
            while True:
                _, number, payload = await events.recv_multipart()
                if int.from_bytes(number, "big") > self.next_number:
                    await self._ask_again(context)
                self._apply(number, payload)

    async def _ask_again(self, context: zmq.asyncio.Context) -> None:
        with context.socket(zmq.DEALER) as replay:
            replay.setsockopt(zmq.LINGER, 0)
            replay.connect(self.replay)
            await replay.send_multipart((b"", self.next_number.to_bytes(8, "big")))
            while True:
                _, topic, number, payload = await replay.recv_multipart()
                if not topic:
                    return
                self._apply(number, payload)

    def _apply(self, number: bytes, payload: bytes) -> None:
        if int.from_bytes(number, "big") == self.next_number:
            self.next_number += 1
            for event in msgspec.msgpack.decode(payload)[1]:
                self.index.apply(event)

    async def follow_load(self, session: aiohttp.ClientSession) -> None:
        """What was read last counts until there is something newer."""
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(f"{self.url}/metrics/load", raise_for_status=True) as answer:
                    self.read_load(await answer.text())
            await asyncio.sleep(SCRAPE_S)

    def read_load(self, page: str) -> None:
        families = text_string_to_metric_families(page)
        values = {sample.name: sample.value for family in families for sample in family.samples}
        self.num_waiting, self.kv_use = values[_WAITING], values[_USE]


def scores(
    replicas: Sequence[Replica], prompts: Sequence[Sequence[int]], salt: str, weight: Mapping[str, float], now: float
) -> list[float]:
    """The weighted sum for each replica, each score between 0 and 1."""
    longest = max(replica.num_waiting for replica in replicas)
    spread = longest - min(replica.num_waiting for replica in replicas)
    sums = []
    for replica in replicas:
        keys = [block_keys(prompt, size, b"", salt) for prompt in prompts] if (size := replica.index.block_size) else []
        held = sum(replica.index.num_held(of_prompt, now) for of_prompt in keys)
        parts = {
            "prefix-cache-scorer": held / (sum(map(len, keys)) or 1),
            "queue-scorer": (longest - replica.num_waiting) / spread if spread else 1.0,
            "kv-cache-utilization-scorer": 1.0 - replica.kv_use,
        }
        sums.append(sum(weight[name] * min(1.0, max(0.0, part)) for name, part in parts.items()))
    return sums


class Picker:
    """Answers nginx with the location of the replica that is to serve a request."""

    def __init__(self, replicas: Sequence[Replica], chance: random.Random) -> None:
        self._replicas, self._chance, self._weights = replicas, chance, weights()
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, _: web.Application) -> AsyncIterator[None]:
        """Follow all replicas for as long as the application runs; requests come when their events are known."""
        context = zmq.asyncio.Context()
        started = [asyncio.Event() for _ in self._replicas]
        async with aiohttp.ClientSession() as self._session:
            self._tasks = [
                asyncio.create_task(replica.follow_events(context, event))
                for replica, event in zip(self._replicas, started, strict=True)
            ]
            self._tasks += [asyncio.create_task(replica.follow_load(self._session)) for replica in self._replicas]
            for event in started:
                await event.wait()
            yield
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        context.destroy(linger=0)

    async def pick(self, request: web.Request) -> web.Response:
        """Answer with the location, and with an error when what follows the replicas has failed."""
        for task in self._tasks:
            if task.done():
                task.result()
        body = await request.read()
        prompts = await self._render(request.path, body) if request.path in RENDERED else []
        salt = (msgspec.json.decode(body).get("cache_salt") or "") if prompts else ""
        now = time.monotonic()
        sums = scores(self._replicas, prompts, salt, self._weights, now)
        best = self._chance.choice([index for index, total in enumerate(sums) if total == max(sums)])
        chosen = self._replicas[best]
        chosen.num_picked += bool(prompts)
        if size := chosen.index.block_size:
            for prompt in prompts:
                chosen.index.believe(block_keys(prompt, size, b"", salt), now)
        return web.Response(headers={"X-Accel-Redirect": f"@replica-{best}"})

    async def _render(self, path: str, body: bytes) -> list[list[int]]:
        """The token ids of the request's prompts; none where it will be refused."""
        assert self._session is not None
        replica = self._chance.choice(self._replicas)
        headers = {"Content-Type": "application/json"}
        async with self._session.post(f"{replica.url}{path}/render", data=body, headers=headers) as answer:
            if answer.status != 200:
                return []
            rendered = await answer.json()
        return [each["token_ids"] for each in (rendered if isinstance(rendered, list) else [rendered])]

    async def readyz(self, _: web.Request) -> web.Response:
        """GET /readyz: how many requests with a prompt each replica was given."""
        return web.json_response({"picked": [replica.num_picked for replica in self._replicas]})


def build_app(picker: Picker) -> web.Application:
    app = web.Application(client_max_size=2 << 20)
    app.cleanup_ctx.append(picker.run)
    app.add_routes([web.get("/readyz", picker.readyz), web.route("*", "/{path:.*}", picker.pick)])
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--replica", action="append", required=True, metavar="URL,EVENTS,REPLAY")
    parser.add_argument("--seed", type=int, default=1, help="of what is left to chance")
    arguments = parser.parse_args()
    replicas = [Replica(*given.split(",")) for given in arguments.replica]
    picker = Picker(replicas, random.Random(arguments.seed))
    web.run_app(build_app(picker), host="127.0.0.1", port=arguments.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
