"""Turns the fields that a prompt came in into what errors call it. Knows no prompt."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptName:
    """The field that is at fault where a prompt is, and the others that were written into it."""

    param: str
    beside: tuple[str, ...] = ()

    def __str__(self) -> str:
        others = " and ".join(f"`{name}`" for name in self.beside)
        return f"`{self.param}` with {others}" if others else f"`{self.param}`"
