"""Prints a table of Markdown row by row, so that it can be read while a benchmark runs."""


def print_head(*names: str) -> None:
    print_row(*names)
    print("|---" * len(names) + "|", flush=True)


def print_row(*cells: object) -> None:
    """Numbers with a fraction are printed with one digit of it."""
    texts = (f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells)
    print(f"| {' | '.join(texts)} |", flush=True)
