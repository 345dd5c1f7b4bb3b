"""Checks which functions a body lets the model call, for all APIs that have tools."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from roseinfer.errors import InvalidRequest
from roseinfer.text.answers.functions import Function


@dataclass(frozen=True, slots=True)
class FunctionChoice:
    """Which functions of a body the model may call, and whether it must."""

    defined: Mapping[str, Function]  # by the paths of their schemas in the body
    mode: Literal["none", "auto", "required"]
    names: Sequence[str] | None = None  # of those that it may call; None: all
    field: str = "tools"  # that defines them

    def check(self, names_param: str) -> None:
        """Raises InvalidRequest; `names_param` is the field that names functions."""
        known = Counter(function.name for function in self.defined.values())
        if twice := next((name for name in known if known[name] > 1), None):
            raise InvalidRequest(f"`{self.field}` has two functions called {twice}.", param=self.field)
        if self.mode == "none":
            return
        if not known:
            chooser = names_param.partition(".")[0]
            raise InvalidRequest(f"`{chooser}` needs a function in `{self.field}`.", param=chooser)
        if missing := next((name for name in self.names or () if name not in known), None):
            raise InvalidRequest(f"`{self.field}` has no function {missing}.", param=names_param)
        for path, function in self.defined.items():
            if (function.parameters or {}).get("type", "object") != "object":
                raise InvalidRequest(f"`{path}` must be of type object: arguments are one.", param=path)

    @property
    def functions(self) -> list[Function]:
        """Those that the model may call."""
        if self.mode == "none":
            return []
        return [function for function in self.defined.values() if self.names is None or function.name in self.names]
