"""Turns a long body, or JSON within it, into a refusal if it holds more values than any request needs. Decodes none.

Decoding and checking a value takes some tens of nanoseconds, in which no other thread of the process runs: a body of
two megabytes can hold a million, and then neither a stream nor a probe is answered for a tenth of a second. Counting
them first takes a few milliseconds, in steps between which the event loop gets its turn.
"""

from collections.abc import Iterable

import msgspec

from roseinfer.errors import InvalidRequest, PromptTooLong, RequestError

FEW_VALUES = 1 << 16  # beside those of prompts as long as the context: 64 prompts of a thousand token ids


def check_num_values(raw: bytes | bytearray, max_model_len: int) -> None:
    """Raise PromptTooLong or InvalidRequest where a body holds more values than FEW_VALUES and two contexts."""
    limit = _limit(max_model_len)
    if _num_separators(raw) > limit and _num_values(raw, limit) > limit:
        raise _refusal(raw, limit, max_model_len)


def check_num_values_within(texts: Iterable[tuple[str, str]], max_model_len: int) -> None:
    """The same of texts in a body that are JSON and will be decoded, each behind its name; all together hold as many.

    They cannot be counted before the body is decoded: there a bracket may be written as six characters.
    """
    limit = _limit(max_model_len)
    raws = {name: text.encode(errors="surrogatepass") for name, text in texts}
    if sum(map(_num_separators, raws.values())) <= limit:
        return
    if sum(_num_values(raw, limit) for raw in raws.values()) > limit:
        name = max(raws, key=lambda name: len(raws[name]))
        message = f"`{name}` is too long: all the JSON in the texts of a body holds at most {limit} values."
        raise InvalidRequest(message, param=name)


def _limit(max_model_len: int) -> int:
    return FEW_VALUES + 2 * max_model_len


def _num_separators(json: bytes | bytearray) -> int:
    """At least the number of values in it, less one, if it is JSON: each but the first follows one of these."""
    return json.count(b",") + json.count(b"[") + json.count(b"{")


def _num_values(raw: bytes | bytearray, limit: int) -> int:
    """The same with texts left out; more than the limit stands for any number."""
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # now every quotation mark begins or ends a text
    if bare.count(b'"') > 4 * limit:  # each value has a text for a name at most, and may be one
        return limit + 1
    return _num_separators(b"".join(bare.split(b'"')[::2]))


def _refusal(raw: bytes | bytearray, limit: int, max_model_len: int) -> RequestError:
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return InvalidRequest("The body must be a JSON object.")
    except (ValueError, RecursionError):
        return InvalidRequest("The body is not valid JSON, or nested too deeply.")
    name = max(fields, key=lambda name: len(memoryview(fields[name])))
    head = bytes(memoryview(fields[name])[:64]).translate(None, b" \t\r\n")
    if name == "prompt" and head[1:2].isdigit():
        message = f"This model's context is {max_model_len} tokens; those of `prompt` do not fit."
        return PromptTooLong(message, param=name)
    return InvalidRequest(f"`{name}` is too long: a body holds at most {limit} values.", param=name)
