"""Scores of texts over HTTP, against transformers on the same weights, and as an evaluation harness reads them.

In float32 the two differ by rounding alone: no log-probability by more than `TOLERANCE`.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import roseinfer
from tests.conftest import requires_all
from tests.e2e.server import Server, running

pytestmark = pytest.mark.e2e
DEMO = Path(roseinfer.__file__).parent / "demo"
MODEL = "roseinfer-demo"
TOLERANCE = 2e-4
TEXTS = [
    "The scheduler decides which sequences advance in a step, keeps their blocks and preempts them.",
    "def add(first: int, second: int) -> int:\n    return first + second\n",
    "Überraschung: naïve 東京 costs 5 €.",
    "import os\n" * 60,  # longer than one chunk of a prompt
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """In float32, and with prompts cut into many chunks."""
    log = tmp_path_factory.mktemp("scoring") / "log"
    with running(log, "--dtype", "float32", "--scheduler.max-num-batched-tokens", "96") as ready:
        yield ready


class Reference:
    """The embedded model in transformers."""

    def __init__(self) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(DEMO)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """After each token, of each token: [tokens, vocabulary]."""
        logits: torch.Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return logits.double().log_softmax(-1)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def complete(server: Server, **body: Any) -> list[dict[str, Any]]:
    status, reply = server.post("/v1/completions", {"model": MODEL, "temperature": 0} | body)
    assert status == 200, reply
    choices: list[dict[str, Any]] = reply["choices"]
    return choices


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_scores_of_a_text_are_those_of_the_reference(server: Server, reference: Reference, max_tokens: int) -> None:
    choices = complete(server, prompt=TEXTS, echo=True, logprobs=3, max_tokens=max_tokens)
    assert len(choices) == len(TEXTS)
    for text, choice in zip(TEXTS, choices, strict=True):
        token_ids = reference.ids(text)
        expected = reference.logprobs(token_ids)[:-1]
        following = torch.tensor(token_ids[1:]).unsqueeze(-1)
        told = choice["logprobs"]
        assert choice["text"].startswith(text)
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        assert len(told["token_logprobs"]) == len(token_ids) + max_tokens
        scores = told["token_logprobs"][1 : len(token_ids)]
        assert scores == pytest.approx(expected.gather(1, following).flatten().tolist(), abs=TOLERANCE)
        for own, top, likeliest in zip(scores, told["top_logprobs"][1:], expected.topk(3).values, strict=False):
            assert sorted(top.values(), reverse=True)[:3] == pytest.approx(likeliest.tolist(), abs=TOLERANCE)
            assert own in top.values()
        pieces = list(zip(told["tokens"], told["text_offset"], strict=True))[: len(token_ids)]
        assert all(choice["text"][offset:].startswith(t) for t, offset in pieces if not t.startswith("bytes:"))


def test_a_prompt_is_scored_the_same_to_the_bit_cached_or_not(server: Server) -> None:
    body: dict[str, Any] = {"prompt": TEXTS[3], "echo": True, "logprobs": 2, "max_tokens": 4}
    complete(server, prompt=TEXTS[3], max_tokens=1)  # whose blocks are in the cache now
    [first] = complete(server, **body)
    assert complete(server, **body) == [first]
    together = complete(server, **body | {"prompt": [*TEXTS[:3], TEXTS[3]]})
    assert together[3]["logprobs"] == first["logprobs"]
    status, reply = server.post("/v1/completions", {"model": MODEL, "temperature": 0} | body)
    assert status == 200
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "such a prompt is read from its beginning"


def test_the_likelihood_of_a_continuation_is_the_sum_of_its_tokens(server: Server, reference: Reference) -> None:
    """The arithmetic of a multiple-choice task: cut where the context ends, sum, and ask whether greedy says it too."""
    context = reference.ids("The scheduler decides which")
    for continuation in (" sequences advance", " zebra 99"):
        whole = context + reference.ids(continuation)
        [choice] = complete(server, prompt=whole, echo=True, logprobs=1, max_tokens=1)
        told = slice(len(context), len(whole))
        scores, tops = choice["logprobs"]["token_logprobs"][told], choice["logprobs"]["top_logprobs"][told]
        before = reference.logprobs(whole)[len(context) - 1 : -1]
        following = torch.tensor(whole[len(context) :])
        expected = before.gather(1, following.unsqueeze(-1)).sum()
        assert sum(scores) == pytest.approx(float(expected), abs=TOLERANCE * len(scores))
        is_greedy = all(own == max(top.values()) for own, top in zip(scores, tops, strict=True))
        assert is_greedy == bool((before.argmax(-1) == following).all())


def test_the_evaluation_harness_scores_and_generates(server: Server, reference: Reference) -> None:
    """The real model class of lm-evaluation-harness for such servers, `local-completions`, on a task of four lines."""
    asked: dict[str, Any] = {
        "url": server.url,
        "model": MODEL,
        "tokenizer": str(DEMO),
        "batch_size": 2,
        "max_length": 128,
        "loglikelihood": [
            ("The scheduler decides which", " sequences"),
            ("The scheduler decides which", " zebra"),
            ("import os\nimport", " sys"),
            ("for index in", " range(10):"),
        ],
        "rolling": [[TEXTS[0]], [TEXTS[3]]],  # the second is longer than `max_length`: several windows
        "until": [("The scheduler decides which", {"until": ["."], "max_gen_toks": 12})],
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.e2e.harness_scores"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode and "No module named 'lm_eval'" in done.stderr and not requires_all():
        pytest.skip("lm-eval is not installed; `make setup` does it")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    for (context, continuation), (score, is_greedy) in zip(asked["loglikelihood"], told["loglikelihood"], strict=True):
        whole, length = reference.ids(context + continuation), len(reference.ids(context))
        before, following = reference.logprobs(whole)[length - 1 : -1], torch.tensor(whole[length:])
        assert score == pytest.approx(float(before.gather(1, following.unsqueeze(-1)).sum()), abs=0.01)
        assert is_greedy == bool((before.argmax(-1) == following).all())
    first = [0, *reference.ids(TEXTS[0])]  # a rolling likelihood begins behind the token that ends a text
    expected = reference.logprobs(first)[:-1].gather(1, torch.tensor(first[1:]).unsqueeze(-1)).sum()
    assert told["rolling"][0] == pytest.approx(float(expected), abs=0.01)
    assert told["rolling"][1] < 0
    assert told["until"] == [complete(server, prompt=asked["until"][0][0], max_tokens=12, stop=".")[0]["text"]]
