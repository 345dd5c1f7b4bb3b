"""Cuts a weight that is being packed into pieces of rows that stay in a processor's caches on the way."""

from collections.abc import Iterator

import torch

from roseinfer.model.device import Parts

_PIECE_NUMBERS = 1 << 20  # of a weight
_PIECE_MULTIPLE = 48  # of which a piece's rows are a multiple: every packed form begins anew there


def pieces_of(parts: Parts) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some rows of a weight after the other: where they are, and their numbers. Little is copied."""
    size = max(1, _PIECE_NUMBERS // parts[0].shape[1] // _PIECE_MULTIPLE) * _PIECE_MULTIPLE
    start, num_rows = 0, sum(map(len, parts))
    while start < num_rows:
        rows = slice(start, min(start + size, num_rows))
        yield rows, _some_rows(parts, rows)
        start = rows.stop


def _some_rows(parts: Parts, rows: slice) -> torch.Tensor:
    found, first = [], 0
    for part in parts:
        found.append(part[max(0, rows.start - first) : max(0, rows.stop - first)])
        first += len(part)
    found = [piece for piece in found if len(piece)]
    return found[0] if len(found) == 1 else torch.cat(found)


def whole(parts: Parts) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
