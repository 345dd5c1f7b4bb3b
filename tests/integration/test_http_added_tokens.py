"""Forced calls and forms over vocabularies whose tags are added tokens, under the real library of grammars."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roseinfer.config.options import StructuredConfig
from roseinfer.engine.core.constraint import Matcher
from roseinfer.messages import EngineInfo, Request, TokenOutput
from roseinfer.records import FinishReason
from roseinfer.text.grammar.checker import GrammarChecker
from roseinfer.text.grammar.compiler import Vocabulary
from roseinfer.text.templates import ChatTemplate
from roseinfer.text.text_model import TextModel
from roseinfer.text.tokenizer.tokenizer import Tokenizer
from tests.integration.test_http_tools import HERMES, NAMED, told
from tests.unit.server.harness import Answer, Reply, ScriptedEngine, serving, times
from tests.unit.text.grammar import tagged
from tests.unit.text.grammar.tagged import EOS_TEXT, FAMILIES, Family

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [1, "<tool_call>"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g")]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@dataclass(frozen=True)
class Served:
    """One checkpoint, and a model of it that says what it is given or whatever its grammar allows."""

    family: Family
    info: EngineInfo
    vocabulary: Vocabulary
    tokenizer: Tokenizer
    checker: GrammarChecker

    @property
    def eos(self) -> int:
        return self.info.eos_token_ids[0]

    async def ask(self, reply: Reply, **body: Any) -> Answer:
        engine = ScriptedEngine(reply, self.info)
        text_model = TextModel(Tokenizer.load(Path(self.info.checkpoint_dir)), ChatTemplate(HERMES, {}))
        async with serving(engine, text=text_model) as server:
            server.service.grammar_checker = self.checker
            return await (server.complete(**body) if "prompt" in body else server.chat(**body))

    def says(self, text: str) -> Reply:
        """In the tokens that the vocabulary has for it; a grammar must allow each."""
        token_ids = iter([*self.tokenizer.encode_here(text, add_special_tokens=False), self.eos])
        return self._follow(lambda allowed: _next_of(token_ids, allowed))

    def says_anything(self, seed: int) -> Reply:
        random = np.random.default_rng(seed)
        return self._follow(lambda allowed: int(random.choice(sorted(allowed))))

    def _follow(self, choose: Callable[[set[int]], int]) -> Reply:
        def reply(request: Request) -> Iterable[TokenOutput]:
            grammar = request.params.grammar
            matcher = None if grammar is None else self.vocabulary.compile(grammar).matcher()
            is_over = False
            while not is_over:
                token_id = choose(self._allowed(matcher))
                if matcher is not None and token_id != self.eos:
                    matcher.accept(token_id)
                    assert not matcher.has_failed
                is_over = token_id == self.eos or (matcher is not None and matcher.is_over)
                stop = token_id if token_id == self.eos else None
                yield TokenOutput(
                    request.request_id, [token_id], None, FinishReason.STOP if is_over else None, stop, times()
                )

        return reply

    def _allowed(self, matcher: Matcher | None) -> set[int]:
        mask = np.full(-(-self.info.vocab_size // 32), 0xFFFFFFFF, np.uint32)
        if matcher is not None:
            matcher.fill(mask)
        return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def _next_of(token_ids: Iterator[int], allowed: set[int]) -> int:
    token_id = next(token_ids)
    assert token_id in allowed
    return token_id


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tagged.write_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param)
    info = tagged.engine_info(directory, request.param)
    vocabulary = Vocabulary.load(directory, info.vocab_size, info.eos_token_ids)
    checker = GrammarChecker(StructuredConfig(), lambda: info)
    yield Served(request.param, info, vocabulary, Tokenizer.load(directory), checker)
    checker.close()


def calls_of(answer: Answer, *, stream: bool) -> list[dict[str, str]]:
    """Names and arguments."""
    assert answer.status == 200, answer.json
    if stream:
        content, calls, reason = told(answer.events)
    else:
        [choice] = answer.json["choices"]
        content, reason = choice["message"]["content"], choice["finish_reason"]
        calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert (content or None, reason) == (None, "tool_calls")
    return calls


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tool_choice", ["required", NAMED])
async def test_a_forced_call_is_said_with_the_added_tokens_and_is_read(
    served: Served, tool_choice: object, *, stream: bool
) -> None:
    answer = await served.ask(served.says(CALL), tools=TOOLS, tool_choice=tool_choice, stream=stream)
    assert calls_of(answer, stream=stream) == [{"name": "f", "arguments": '{"a": 1}'}]


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_a_model_says_where_calls_are_forced_is_calls(served: Served, seed: int) -> None:
    answer = await served.ask(served.says_anything(seed), tools=TOOLS, tool_choice="required")
    calls = calls_of(answer, stream=False)
    assert calls
    for call in calls:
        assert call["name"] in "fg"
        assert json.loads(call["arguments"])["a"] in [1, "<tool_call>"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_not_forced_is_read_too(served: Served, *, stream: bool) -> None:
    answer = await served.ask(served.says(CALL), tools=TOOLS, stream=stream)
    assert calls_of(answer, stream=stream) == [{"name": "f", "arguments": '{"a": 1}'}]


@pytest.mark.parametrize("path", [{"prompt": "x"}, {}], ids=["completions", "chat"])
@pytest.mark.parametrize(
    "structured_outputs",
    [
        {"regex": r"<tool_call>\n.*<\|im_end\|>"},
        {"choice": ["<tool_call>\nhm</tool_call><|im_end|>"]},
        {"grammar": 'start: "<tool_call>" /\\n[a-z]*/ "</tool_call><|im_end|>"'},
    ],
    ids=["regex", "choice", "lark"],
)
async def test_a_form_may_hold_the_texts_of_added_tokens(
    served: Served, structured_outputs: dict[str, Any], path: dict[str, str]
) -> None:
    """Control tokens are written out, since an answer does not contain them."""
    text = "<tool_call>\nhm</tool_call><|im_end|>"
    inner = served.tokenizer._inner
    own = served.tokenizer.encode_here("<tool_call>\nhm</tool_call>", add_special_tokens=False)
    written_out = [inner.get_vocab()[piece] for piece in ("<|", "im", "_", "end", "|>")]
    token_ids = iter([*own, *written_out, served.eos])
    reply = served._follow(lambda allowed: _next_of(token_ids, allowed))
    answer = await served.ask(reply, structured_outputs=structured_outputs, **path)
    assert answer.status == 200, answer.json
    [choice] = answer.json["choices"]
    assert (choice["text"] if path else choice["message"]["content"]) == text


def asking_for(form: str, text: str) -> dict[str, Any]:
    """Fields of a body whose answer holds the text and nothing else of its own."""
    if form == "tools":
        parameters = PARAMETERS | {"properties": {"a": {"const": text}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        return {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    of_form: dict[str, Any] = {
        "regex": re.escape(text),
        "json": PARAMETERS | {"properties": {text: {"const": text}}, "required": [text]},
        "grammar": f"start: {json.dumps(text)}",
        "choice": [text],
    }
    return {"structured_outputs": {form: of_form[form]}}


@pytest.mark.parametrize("added", ["<tool_call>", "<think>", "</think>", "<|im_start|>", EOS_TEXT])
@pytest.mark.parametrize("form", ["regex", "json", "grammar", "choice", "tools"])
async def test_every_form_may_hold_every_added_token(served: Served, form: str, added: str) -> None:
    """Marked special or not, at the beginning, in the middle and at the end."""
    text = f"{added}{added}\nx{added}"
    answer = await served.ask(served.says_anything(0), **asking_for(form, text))
    assert answer.status == 200, answer.json
    message = answer.json["choices"][0]["message"]
    if form == "tools":
        [call] = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": text}
    elif form == "json":
        assert json.loads(message["content"]) == {text: text}
    else:
        assert message["content"] == text


@pytest.mark.parametrize("path", [{"prompt": "x"}, {}], ids=["completions", "chat"])
async def test_free_text_leaves_out_what_the_vocabulary_marks_special(served: Served, path: dict[str, str]) -> None:
    answer = await served.ask(served.says("a<|im_start|><tool_call>b</tool_call>"), **path)
    [choice] = answer.json["choices"]
    is_marked = served.family == "hermes3"
    assert (choice["text"] if path else choice["message"]["content"]) == (
        "ab" if is_marked else "a<tool_call>b</tool_call>"
    )
