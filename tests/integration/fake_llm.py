"""An `LLM` without a model: the real scheduler over the fake runner, in a thread, and one token for each character."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import tokenizers

from roseinfer import wiring
from roseinfer.config.options import Config
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.link.client import AsyncEngine
from roseinfer.engine.link.transport import ThreadTransport
from roseinfer.messages import SamplingParams
from roseinfer.records import Observer
from tests.unit.engine.harness import EOS, VOCAB_SIZE, make_engine, make_request, roomy_estimate, run_alone

ALPHABET = [chr(code) for code in range(0x21, 0x7F)]  # 94 characters, ids 1 to 94; id 0 is a space
TEMPLATE = "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"


def text_of(token_ids: list[int]) -> str:
    """What the tokens spell."""
    return "".join(" " if token_id == 0 else ALPHABET[token_id - 1] for token_id in token_ids if token_id < 95)


def write_tokenizer(directory: Path, *, chat_template: str | None = TEMPLATE) -> None:
    """A byte-level vocabulary with one token for each printable ASCII character, and two special tokens."""
    vocab = {"\u0120": 0} | {char: i for i, char in enumerate(ALPHABET, start=1)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<pad>", "<eos>"])
    assert (inner.token_to_id("<eos>"), inner.get_vocab_size()) == (EOS, VOCAB_SIZE)
    inner.save(str(directory / "tokenizer.json"))
    settings = {} if chat_template is None else {"chat_template": chat_template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def make_fake_engine(config: Config, directory: Path, latency_s: float) -> Engine:
    engine = make_engine(
        num_blocks=config.cache.num_blocks or 256, max_model_len=128, prefix_caching=config.cache.prefix_caching
    )
    engine.runner.latency_s = latency_s  # type: ignore[attr-defined]  # the fake's own knob
    engine.info = msgspec.structs.replace(engine.info, checkpoint_dir=str(directory))
    return engine


def use_fake_engine(monkeypatch: pytest.MonkeyPatch, directory: Path, latency_s: float = 0.0) -> list[AsyncEngine]:
    """Let every `LLM` have an engine of this kind; returns the list of those that were made."""
    made: list[AsyncEngine] = []

    def build_client(config: Config, observer: Observer) -> AsyncEngine:
        def build(config: Config, _: object) -> Engine:
            return make_fake_engine(config, directory, latency_s)

        transport = ThreadTransport(config, build, check_when_idle=True)
        made.append(AsyncEngine(transport, observer, config.engine.step_timeout_s, roomy_estimate()))
        return made[-1]

    monkeypatch.setattr(wiring, "build_client", build_client)
    return made


def greedy(max_tokens: int, **params: object) -> SamplingParams:
    """The given number of tokens, the likeliest each."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)  # type: ignore[arg-type]


def expected_tokens(prompt: list[int], max_tokens: int) -> list[int]:
    """What the fake engine says, whatever runs beside it."""
    return run_alone(make_request("alone", prompt, max_tokens=max_tokens))


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
