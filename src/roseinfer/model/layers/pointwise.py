"""Rows of a layer's linears into heads ready for attention, and into gated rows: what needs one head or one number.

Knows nothing about weights of linears, pages or batches. On a CPU with compiled kernels each is one call of
kernels/pointwise.cpp, on a GPU one kernel of triton_kernels/pointwise.py; elsewhere it is torch, which the kernels are
held against. All compute in float32, and give a row the same bits whatever other rows there are.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from roseinfer.model.layers.embedding import Placement, RMSNorm
from roseinfer.model.layers.rope import Rotation

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_MAX_COMPILED_HEAD_DIM = 512
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """How a merged row is cut: heads of queries, then of keys, then as many of values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def total(self) -> int:
        return self.num_heads + 2 * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [head_dim] of the norms of queries and of keys."""

    query: torch.Tensor
    key: torch.Tensor
    epsilon: float


class HeadTurner:
    """Norms, where the model has them, and rotations of queries and keys."""

    def __init__(self, counts: HeadCounts, norms: HeadNorms | None, placement: Placement) -> None:
        self._counts = counts
        self._has_triton = _has_triton(placement)
        self._compiled = None
        if counts.head_dim <= _MAX_COMPILED_HEAD_DIM:
            self._compiled = _compiled("turn_heads", placement, _POINTER, *[_SIZE] * 5, *[_POINTER] * 4, ctypes.c_float)
        self._query_norm = self._key_norm = self._weights = None
        self._epsilon = 0.0
        if norms is not None:
            self._epsilon = norms.epsilon
            self._query_norm, self._key_norm = (RMSNorm(w, norms.epsilon, placement) for w in (norms.query, norms.key))
            query, key = (w.to(placement.device, torch.float32, copy=True) for w in (norms.query, norms.key))
            self._weights = query, key

    def __call__(self, merged: torch.Tensor, rotation: Rotation) -> Heads:
        """Merged rows [tokens, heads * head_dim] -> queries, keys and values [tokens, heads, head_dim].

        May change the rows it is given; what it returns may be views of them.
        """
        counts = self._counts
        first_key, first_value = counts.num_heads, counts.num_heads + counts.num_kv_heads
        heads = merged.view(-1, counts.total, counts.head_dim)
        q, k, v = heads[:, :first_key], heads[:, first_key:first_value], heads[:, first_value:]
        if self._compiled is not None:
            self._by_compiled(self._compiled, merged, rotation)
        elif self._has_triton:
            self._by_triton(heads, rotation)
        else:
            return rotation(_normed(q, self._query_norm)), rotation(_normed(k, self._key_norm)), v
        return q, k, v

    def _by_compiled(self, turn: Callable[..., None], merged: torch.Tensor, rotation: Rotation) -> None:
        counts = self._counts
        turn(
            *(merged.data_ptr(), merged.shape[0], merged.stride(0)),
            *(counts.num_heads, counts.num_kv_heads, counts.head_dim),
            *(rotation.cos.data_ptr(), rotation.sin.data_ptr()),
            *(weight.data_ptr() for weight in self._weights) if self._weights else (None, None),
            self._epsilon,
        )

    def _by_triton(self, heads: torch.Tensor, rotation: Rotation) -> None:
        from roseinfer.model.triton_kernels.pointwise import turn_heads

        num_heads, num_kv_heads = self._counts.num_heads, self._counts.num_kv_heads
        turn_heads(heads, num_heads, num_kv_heads, rotation.cos, rotation.sin, self._weights, self._epsilon)


def _normed(heads: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
    return heads if norm is None else norm(heads.float().flatten(0, 1)).view(heads.shape)


class SiluGate:
    """silu(gate) * up: the activation of SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, placement: Placement) -> None:
        self._has_triton = _has_triton(placement)
        self._compiled = _compiled("gate", placement, _POINTER, _POINTER, _SIZE, _SIZE)

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Gates and what they let through [rows, 2 * inner] -> [rows, inner], in the same type."""
        if self._compiled is not None:
            num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
            out = gate_up.new_empty(num_rows, inner)
            self._compiled(gate_up.data_ptr(), out.data_ptr(), num_rows, inner)
            return out
        if self._has_triton:
            from roseinfer.model.triton_kernels.pointwise import silu_gate

            return silu_gate(gate_up)
        gates, up = gate_up.chunk(2, -1)
        wide = gates.float()
        # Not torch's silu: the exponential it takes for the last few numbers of a thread's work is another than for
        # those before, so that a row's bits would depend on where it lies. Its `exp` is one for all.
        shares = wide.neg().exp_().add_(1.0)
        return torch.div(wide, shares, out=shares).mul_(up).to(gate_up.dtype)


def _compiled(name: str, placement: Placement, *argtypes: object) -> Callable[..., None] | None:
    """The CPU kernel for the placement's type; None where there is none."""
    name = f"roseinfer_{name}_{_DTYPE_NAMES.get(placement.dtype)}"
    if placement.device.type != "cpu" or placement.kernels is None or not placement.kernels.has(name):
        return None
    return placement.kernels.function(name, *argtypes)


def _has_triton(placement: Placement) -> bool:
    return placement.device.type == "cuda" and find_spec("triton") is not None
