"""What clients send by mistake or by malice, in classes: bodies for both generation endpoints, and whole requests."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

JSON_TYPE = {"Content-Type": "application/json"}


class Case(NamedTuple):
    """One request that must be refused."""

    kind: str
    method: str
    path: str
    body: bytes
    headers: dict[str, str]


BASE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
}
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "n", "max_tokens", "min_tokens", "seed", "timeout_s")

# Field -> values that do not fit it on either endpoint, by class.
FIELDS: dict[str, dict[str, list[Any]]] = {
    "a number of the wrong type": {name: ["1", True, [], {}, [1]] for name in NUMBERS},
    "a number out of range": {
        "temperature": [-0.1, 2.1, 1e308],
        "top_p": [0, -1, 1.01],
        "top_k": [-2, 2**31, 2**63],
        "min_p": [-0.1, 1.1],
        "repetition_penalty": [0, 5e-324, 1e-39, 1e-6, 2.1],
        "n": [0, -1, 129, 1_000_000],
        "max_tokens": [0, -2, 2**31, 2**40],
        "min_tokens": [-1, 2**31],
        "seed": [2**63, -(2**63) - 1, 2**70],
        "timeout_s": [0, -1, 1e9],
        "queue_timeout_s": [0, -0.5, 1e300],
        "priority": [-101, 101],
        "stream_interval": [0, -1, 1025],
    },
    "a fraction for a whole number": {name: [1.5, 0.1] for name in ("top_k", "n", "max_tokens", "seed", "priority")},
    "a boolean of the wrong type": {name: [1, 0, "true", [], {}] for name in ("stream", "ignore_eos")},
    "stop strings": {
        "stop": ["", [""], ["a", ""], ["a"] * 17, "x" * 257, [1], [None], 5, {}, [["a"]], True],
        "stop_token_ids": [[-1], [2**31], ["1"], [1.5], [True], [10**6], 1, "1", {}, [0] * 65],
    },
    "an unknown field": {name: [1] for name in ("temprature", "", " ", "__class__", "prompt\x00", "é", "x" * 10_000)},
    "a nested object": {
        "stream_options": [
            1,
            "a",
            [],
            {},
            {"include_usage": True},
            {"include_usage": 1},
            {"unknown": True},
            {"include_usage": {"a": 1}},
        ],
        "vllm_xargs": [1, "a", [], {"a": 1}, {"a": {"b": "c"}}],
    },
    "a string of the wrong type": {name: [1, [], {}, True] for name in ("user", "cache_salt", "model")},
    "a salt that is too long": {"cache_salt": ["x" * 129, "é" * 1000]},
    "a model that is not here": {"model": ["gpt-5", "", "../etc/passwd", "roseinfer-demo\n", "x" * 5000]},
}
COMPLETIONS: dict[str, dict[str, list[Any]]] = {
    "a prompt that is none": {
        "prompt": ["", [], None, 3, 1.5, True, {}, {"text": "a"}, [""], ["a", ""], [[]], [[1], []], [None], [True]]
    },
    "a prompt of mixed kinds": {"prompt": [["a", 1], [1, "a"], [[1], "a"], [[1], 2], [["a"]], [[[1]]], [{}]]},
    "token ids out of the vocabulary": {
        "prompt": [[-1], [10**6], [2**31], [2**63], [2**70], [1, 10**6], [[1], [10**6]], [[1], [-1]], [1.5]]
    },
    "too many prompts": {"prompt": [["a"] * 65, [[1]] * 65, ["a"] * 1000]},
    "more than the context": {
        "prompt": ["word " * 3000, [1] * 1024, [1] * 100_000, ["a", "word " * 3000]],
        "max_tokens": [1024, 100_000, 2**31 - 1],
    },
    "a text that is none": {"prompt": ["\ud800", ["a", "\udfff"], "a\ud800b"]},
    "log-probabilities": {"logprobs": [-1, 21, 1.5, "5", True, [], {}]},
}
SEVENTEEN_LEVELS = json.loads("[" * 17 + "]" * 17)
TEMPLATE_VARIABLES: list[Any] = [
    *(1, "a", True, [], [{}], {"": 1}, {"a b": 1}, {"é": 1}, {"1a": 1}, {"x" * 65: 1}, {"a-b": 1}, {"a\n": 1}),
    *({name: 1} for name in ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")),
    *({name: 1} for name in ("raise_exception", "strftime_now", "range", "namespace", "lipsum", "cycler", "dict")),
    *({name: 1} for name in ("enable_thinkng", "chat_template", "tokenize", "self", "loop", "__class__", "kwargs")),
    *({"enable_thinking": value} for value in ("x" * 17_000, ["x"] * 5000, SEVENTEEN_LEVELS)),
    {f"a{i}": 1 for i in range(33)},
]
CHAT: dict[str, dict[str, list[Any]]] = {
    "messages that are none": {
        "messages": [
            *([], None, "hi", 5, {}, [1], ["hi"], [None], [[]], [{}]),
            *([{"role": "user"}], [{"content": "a"}], [{"role": "user", "content": None}]),
            *([{"role": "user", "content": 5}], [{"role": "user", "content": {}}], [{"role": 1, "content": "a"}]),
            *([{"role": "", "content": "a"}], [{"role": "wizard", "content": "a"}]),
        ]
    },
    "content that is no text": {
        "messages": [
            [{"role": "user", "content": [part]}]
            for part in (
                *({"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}, {"type": "text"}, {"text": "a"}),
                *({"type": "input_audio", "input_audio": {}}, {"type": "file", "file": {}}, 1, "a", None, {}),
                *({"type": "text", "text": 5}, {"type": "refusal", "refusal": "a"}, {"type": "refusal"}),
            )
        ]
    },
    "more than the context": {
        "messages": [[{"role": "user", "content": "word " * 3000}], [{"role": "user", "content": "a"}] * 2000],
        "max_tokens": [1024, 100_000],
        "max_completion_tokens": [1024, 2**31 - 1],
    },
    "log-probabilities": {"logprobs": [5, "true", [], {}], "top_logprobs": [-1, 21, 3, "3", True]},
    "variables of the template": {"chat_template_kwargs": TEMPLATE_VARIABLES},
}
ASKED_OF_OTHERS: dict[str, list[Any]] = {
    "audio": [{}],
    "modalities": [["audio"]],
    "prediction": [{}],
    "web_search_options": [{}],
}

BROKEN_JSON = [
    *(b"", b" ", b"{", b"}", b"[", b"[]", b"null", b"true", b"5", b'"a"', b"{} {}", b"{]", b"{'prompt': 'a'}", b"\x00"),
    *(b'{"prompt": "a",}', b'{"prompt" "a"}', b'{prompt: "a"}', b'{"prompt": "a"', b'{"prompt": "\xff"}', b"\xff\xfe{"),
    *(b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}', b"\xef\xbb\xbf{}"),
    *(
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\x41"}',
        b'{"prompt": "a\nb"}',
        b'{"n": 01}',
        b'{"n": +1}',
        b'{"n": .5}',
    ),
]
HUGE_NUMBERS = [
    b'{"prompt": "a", "seed": ' + b"9" * 1_000_000 + b"}",
    b'{"prompt": "a", "n": -' + b"9" * 100_000 + b"}",
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "temperature": ' + b"1" * 5000 + b"." + b"1" * 5000 + b"}",
    b'{"prompt": "a", "top_p": 1e-999999999999}',
    b'{"prompt": "a", "max_tokens": 1e400}',
]
DEEP = [
    *(opening * depth for opening in (b"[", b'{"a":', b'{"prompt":[') for depth in (2000, 100_000)),
    b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    b'{"metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
]
MEDIA_TYPES = [
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=a",
    "",
    "application/xml",
]
ENCODINGS = ["gzip", "br", "deflate", "zstd", "gzip, gzip", "x-gzip", "unknown"]
UNKNOWN_PATHS = ["/", "/v1", "/v1/embeddings", "/v1/completions/", "//v1/completions", "/V1/completions", "/v1/%00"]
METHODS = ["PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"]


def cases() -> Iterator[Case]:
    """All of them, every class several times."""
    for path, extra in (("/v1/completions", COMPLETIONS), ("/v1/chat/completions", CHAT)):
        others: dict[str, list[Any]] = ASKED_OF_OTHERS if extra is CHAT else {"suffix": ["a"]}
        for table in (FIELDS, extra, {"what only others can do": others}):
            yield from _fields(path, table)
        yield from _whole_bodies(path)
        yield from _heads(path)
    for path in UNKNOWN_PATHS:
        yield Case("a path that is not served", "POST", path, b"{}", JSON_TYPE)
    for path, body in (
        ("/tokenize", b"{}"),
        ("/tokenize", b'{"prompt": 1}'),
        ("/tokenize", b'{"prompt": "a", "chat_template_kwargs": {"enable_thinking": false}}'),
        ("/detokenize", b'{"tokens": [1000000]}'),
    ):
        yield Case("text endpoints", "POST", path, body, JSON_TYPE)


def _fields(path: str, table: dict[str, dict[str, list[Any]]]) -> Iterator[Case]:
    for kind, fields in table.items():
        for name, values in fields.items():
            for value in values:
                yield Case(kind, "POST", path, json.dumps(BASE[path] | {name: value}).encode(), JSON_TYPE)


def _whole_bodies(path: str) -> Iterator[Case]:
    for kind, bodies in (("broken JSON", BROKEN_JSON), ("a number of a million digits", HUGE_NUMBERS), ("depth", DEEP)):
        for body in bodies:
            yield Case(kind, "POST", path, body, JSON_TYPE)
    for size in (2 * 1024 * 1024 + 1, 3_000_000):
        yield Case("too large", "POST", path, b" " * size, JSON_TYPE)


def _heads(path: str) -> Iterator[Case]:
    good = json.dumps(BASE[path]).encode()
    for media_type in MEDIA_TYPES:
        yield Case("no JSON by its own word", "POST", path, good, {"Content-Type": media_type})
    for encoding in ENCODINGS:
        yield Case("compressed", "POST", path, good, JSON_TYPE | {"Content-Encoding": encoding})
    for method in METHODS:
        yield Case("a method that is not served", method, path, good, JSON_TYPE)
    for name in ("x-roseinfer-ledger", "x-roseinfer-intended-time"):
        yield Case("a header that does not fit", "POST", path, good, JSON_TYPE | {name: "soon"})
