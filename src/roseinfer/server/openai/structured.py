"""Turns what a body says of the form of its text into a grammar, and has it checked before the engine hears of it.

Knows no vocabulary and no library: whoever checks is handed in by the wiring.
"""

import asyncio
from concurrent.futures import Future
from typing import Protocol

import msgspec

from roseinfer.errors import InvalidRequest
from roseinfer.messages import Grammar
from roseinfer.server.openai.schema import GenerationBody

_ANY_OBJECT = '{"type":"object"}'


class GrammarCheck(Protocol):
    """Whoever knows whether a grammar can be used: `text/grammar/checker.py`."""

    def check(self, grammar: Grammar, param: str) -> "Future[None]":
        """Raises Overloaded at once; at once or from the future InvalidRequest that names the field, or NotReady."""


def requested_grammar(body: GenerationBody) -> tuple[Grammar, str] | None:
    """The grammar that the body asks for, and the field it stands in. Raises InvalidRequest."""
    grammar = _of_response_format(body)
    if body.structured_outputs is not None:
        if grammar is not None:
            raise InvalidRequest("`response_format` and `structured_outputs` exclude each other.", param=grammar[1])
        grammar = _of_structured_outputs(body)
    return grammar


def _of_response_format(body: GenerationBody) -> tuple[Grammar, str] | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        return Grammar("json_schema", _ANY_OBJECT), "response_format"
    param = "response_format.json_schema.schema"
    return Grammar("json_schema", dump(wanted.json_schema.schema, param)), param


def _of_structured_outputs(body: GenerationBody) -> tuple[Grammar, str] | None:
    wanted = body.structured_outputs
    assert wanted is not None
    if wanted.json is not None:
        param = "structured_outputs.json"
        return Grammar("json_schema", wanted.json if isinstance(wanted.json, str) else dump(wanted.json, param)), param
    if wanted.regex is not None:
        return Grammar("regex", wanted.regex), "structured_outputs.regex"
    if wanted.choice is not None:
        param = "structured_outputs.choice"
        return Grammar("choice", dump(wanted.choice, param)), param
    if wanted.grammar is not None:
        return Grammar("lark", wanted.grammar), "structured_outputs.grammar"
    return Grammar("json_schema", _ANY_OBJECT), "structured_outputs.json_object"


async def check_grammar(wanted: tuple[Grammar, str] | None, check: GrammarCheck | None) -> None:
    """Raises InvalidRequest that names the field of a grammar that cannot be used, Overloaded or NotReady."""
    if wanted is None:
        return
    grammar, param = wanted
    if check is None:
        raise InvalidRequest(f"`{param}`: this server has no grammars.", param=param)
    await asyncio.wrap_future(check.check(grammar, param))


def dump(schema: object, param: str) -> str:
    """As JSON; what it stands for may be no valid schema. Raises InvalidRequest that names the field `param`.

    What a thread with a short stack has decoded may be nested too deeply for the stack of a handler.
    """
    try:
        return msgspec.json.encode(schema).decode()
    except RecursionError:
        raise InvalidRequest(f"`{param}` is nested too deeply.", param=param) from None
