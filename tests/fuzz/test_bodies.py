"""Whatever bytes a body holds, it becomes a struct within its bounds or an error that names a field: nothing else."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.errors import InvalidRequest
from roseinfer.server.anthropic.schema import CountBody, MessagesBody
from roseinfer.server.api.errors import error_body
from roseinfer.server.api.fields import ModelBody
from roseinfer.server.api.parsing import _parse_loosely, parse_body
from roseinfer.server.openai.chat_schema import ChatBody
from roseinfer.server.openai.responses_schema import ResponseBody
from roseinfer.server.openai.schema import CompletionBody
from roseinfer.server.openai.tokenize import DetokenizeBody, TokenizeBody
from tests.fuzz.mutations import check_each, corpus, mutated

BODIES: tuple[type[ModelBody], ...] = (
    *(CompletionBody, ChatBody, ResponseBody, MessagesBody, CountBody),
    *(TokenizeBody, DetokenizeBody),
)
NUM_MUTATIONS = 4000
KEPT = corpus("body")


def check(content: bytes) -> None:
    """The property, for every endpoint."""
    for body_type in BODIES:
        try:
            body = parse_body(content, body_type)
        except InvalidRequest as error:
            told = msgspec.json.decode(error_body(error))["error"]
            assert told["message"]
            assert len(told["message"]) <= 2000
        else:
            msgspec.convert(msgspec.to_builtins(body), body_type)  # what was accepted is within its own bounds
            assert _parse_loosely(content, body_type, None) == body


@pytest.mark.parametrize(("name", "content"), KEPT, ids=[name for name, _ in KEPT])
def test_the_kept_ones(name: str, content: bytes) -> None:
    check(content)
    if name.startswith("good"):
        kinds: dict[str, type[ModelBody]] = {"chat": ChatBody, "messages": MessagesBody, "response": ResponseBody}
        parse_body(content, next((kind for key, kind in kinds.items() if key in name), CompletionBody))


def test_ones_like_them() -> None:
    check_each(mutated([content for _, content in KEPT], NUM_MUTATIONS, seed=1), check)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.integers(min_value=2**62)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
NAMES = sorted({field for body in BODIES for field in body.__struct_fields__})


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), VALUES, max_size=6))
def test_any_object(fields: dict[str, object]) -> None:
    try:
        content = msgspec.json.encode(fields)
    except UnicodeEncodeError:  # a lone surrogate cannot be sent at all
        return
    check(content)


@given(st.binary(max_size=200))
def test_any_bytes(content: bytes) -> None:
    check(content)
