"""What msgspec refuses is found, wherever it is; a value that fits is converted as msgspec does."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from roseinfer.runtime.validation import Misfit, convert

Small = Annotated[int, Meta(ge=0, le=9)]


class Circle(msgspec.Struct, tag_field="kind", tag="circle", forbid_unknown_fields=True):
    radius: Small


class Square(msgspec.Struct, tag_field="kind", tag="square", forbid_unknown_fields=True):
    side: Small = 1

    def __post_init__(self) -> None:
        if self.side == 8:
            raise Misfit("8 is not allowed", ("side",))
        if self.side == 7:
            raise ValueError("7 is not allowed")


class Tree(msgspec.Struct, forbid_unknown_fields=True):
    color: Literal["red", "green"] = "red"
    size: Small | None = None
    shape: Circle | Square | None = None
    weights: Annotated[dict[Annotated[int, Meta(ge=0)], float], Meta(max_length=3)] = {}
    parts: "Annotated[list[Tree | Small], Meta(max_length=3)] | Literal['all']" = []
    pair: tuple[Small, ...] = ()


def misfit(value: Any, expected: Any = Tree) -> Misfit:
    with pytest.raises(Misfit) as caught:
        convert(value, expected, str_keys=True)
    return caught.value


@pytest.mark.parametrize(
    ("value", "path", "sentence"),
    [
        (5, (), "``: Expected `object`, got `integer`."),
        ({"other": 1}, ("other",), "Unknown field `other`."),
        ({"color": "blue"}, ("color",), "`color`: Expected one of 'green', 'red'; got 'blue'."),
        ({"color": 5}, ("color",), "`color`: Expected `string`, got `integer`."),
        ({"size": 10}, ("size",), "`size`: Expected `integer` <= 9."),
        ({"size": "1"}, ("size",), "`size`: Expected `integer or null`, got `string`."),
        ({"shape": {}}, ("shape", "kind"), "Missing field `shape.kind`."),
        ({"shape": {"kind": "line"}}, ("shape", "kind"),
         "`shape.kind`: Expected one of 'circle', 'square'; got 'line'."),
        ({"shape": {"kind": "circle"}}, ("shape", "radius"), "Missing field `shape.radius`."),
        ({"shape": {"side": 2, "kind": "circle"}}, ("shape", "side"), "Unknown field `shape.side`."),
        ({"shape": {"kind": "square", "side": -1}}, ("shape", "side"), "`shape.side`: Expected `integer` >= 0."),
        ({"shape": {"kind": "square", "side": 8}}, ("shape", "side"), "`shape.side`: 8 is not allowed."),
        ({"shape": {"kind": "square", "side": 7}}, ("shape",), "`shape`: 7 is not allowed."),
        ({"weights": {"1": 1, "2": "a"}}, ("weights", "2"), "`weights.2`: Expected `number`, got `string`."),
        ({"weights": {"1": 1, "a": 2}}, ("weights",), "`weights`: Expected `integer`, got `string` as a key, 'a'."),
        ({"weights": {"1.0": 1}}, ("weights",), "`weights`: Expected `integer`, got `string` as a key, '1.0'."),
        ({"weights": {"-1": 1}}, ("weights",), "`weights`: Expected `integer` >= 0 as a key, '-1'."),
        ({"weights": dict.fromkeys("1234", 1)}, ("weights",), "`weights`: Expected `object` of length <= 3."),
        ({"parts": [1, 2, 3, 4]}, ("parts",), "`parts`: Expected `array` of length <= 3."),
        ({"parts": "some"}, ("parts",), "`parts`: Expected 'all'; got 'some'."),
        ({"parts": [1, {"parts": [{}, {"size": -1}]}]}, ("parts", 1, "parts", 1, "size"),
         "`parts[1].parts[1].size`: Expected `integer` >= 0."),
        ({"pair": [1, 2, 3, None]}, ("pair", 3), "`pair[3]`: Expected `integer`, got `null`."),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_named(value: Any, path: tuple[str | int, ...], sentence: str) -> None:
    found = misfit(value)
    assert (found.path, found.sentence()) == (path, sentence)


def test_the_first_of_many_is_named() -> None:
    assert misfit([*range(10)] * 1000 + [10, 11], list[Small]).path == (10_000,)


names = st.sampled_from([*Tree.__struct_fields__, "kind", "radius", "side", "1", "a"])
values = st.recursive(
    st.none() | st.integers(-1, 10) | st.sampled_from(["red", "blue", "all", "circle", "square"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([*Tree.__struct_fields__, "kind", "radius", "side", "1", "a"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@given(values)
def test_what_msgspec_refuses_is_found_and_nothing_else(value: Any) -> None:
    try:
        expected = msgspec.convert(value, Tree, str_keys=True)
    except msgspec.ValidationError:
        found = misfit(value)
        for step in found.path if found.kind == "value" else found.path[:-1]:
            value = value[step]
        assert found.kind != "value" or value == found.value or not isinstance(value, str | int | None)
        assert " - at `" not in found.reason
        return
    assert convert(value, Tree, str_keys=True) == expected
