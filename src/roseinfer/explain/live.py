"""Asks an operations port what its server is doing, for `roseinfer top`."""

import time
import urllib.parse
from typing import Any

import msgspec

from roseinfer.config.flags import url_of
from roseinfer.errors import InvalidRequest
from roseinfer.explain.evidence import get
from roseinfer.observe.metrics.scrape import Page

_TIMEOUT_S = 5.0


class LiveRequest(msgspec.Struct, frozen=True):
    """One request in flight, as `/debug/requests` lists it."""

    id: str
    stage: str
    age_ms: float
    num_prompt_tokens: int
    num_generated_tokens: int
    max_tokens: int
    place: int | None = None  # how many wait before it


class LiveStep(msgspec.Struct, frozen=True):
    """One engine step, as `/debug/steps` lists it."""

    step_id: int
    start_ns: int
    end_ns: int
    kind: str
    num_decode_seqs: int
    num_prefill_tokens: int
    blocked_by: str


class Sample(msgspec.Struct, frozen=True):
    """What a server answered at one moment."""

    at_s: float  # on this host's monotonic clock
    page: Page
    requests: list[LiveRequest]
    steps: list[LiveStep]  # the newest ones, oldest first
    blocker: str  # why the first waiting request waits; empty when none does
    is_place_exact: bool = True  # of the requests that wait


class _Requests(msgspec.Struct):
    requests: list[LiveRequest]
    is_place_exact: bool = True


class _Steps(msgspec.Struct):
    steps: list[LiveStep]


class _Waiting(msgspec.Struct):
    sentence: str
    option: str | None = None
    value: int | None = None


class _Request(msgspec.Struct):
    waiting: _Waiting | None


class LiveServer:
    """A client of one operations port."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """Raises InvalidRequest for what is no URL."""
        found = url_of(url)
        if found is None:
            raise InvalidRequest("It is no URL such as http://127.0.0.1:8001, the operations port's.", param=url)
        self.url = found.rstrip("/")
        self._api_key = api_key

    def sample(self) -> Sample:
        """Asks once. Raises InvalidRequest if the server does not answer, or not like one of ours."""
        page = Page.parse(self._get("/metrics").decode(errors="replace"))
        at_s = time.monotonic()  # of the page, which all rates are of
        listed = self._ask("/debug/requests", _Requests)
        steps = self._ask("/debug/steps?limit=1", _Steps).steps
        return Sample(at_s, page, listed.requests, steps, self._blocker(listed.requests), listed.is_place_exact)

    def _blocker(self, requests: list[LiveRequest]) -> str:
        first = next((request for request in requests if request.place == 0), None)
        if first is None:
            return ""
        try:
            found = self._ask(f"/debug/requests/{urllib.parse.quote(first.id, safe='')}", _Request)
        except InvalidRequest:  # it may have ended by now
            return ""
        return "" if found.waiting is None else _reason_of(found.waiting)

    def _ask(self, path: str, kind: Any) -> Any:
        try:
            return msgspec.json.decode(self._get(path), type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{path} says something else than expected: {error}.", param=self.url) from None

    def _get(self, path: str) -> bytes:
        try:
            return get(self.url + path, self._api_key, _TIMEOUT_S)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=self.url) from None


def _reason_of(waiting: _Waiting) -> str:
    """Returns the limit and the reason, for which a narrow line has room."""
    reason = waiting.sentence.partition(" because ")[2] or waiting.sentence
    return reason if waiting.option is None else f"{waiting.option} = {waiting.value}: {reason}"
