"""Rotary position embedding: frequencies and their scalings, and the rotation of queries and keys.

Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding": dimension i of a head and dimension
i + head_dim / 2 are one point of a plane, turned by position times frequency i.
"""

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch.nn import functional

from roseinfer.model.attention.base import AttentionSpec
from roseinfer.model.device import Placement

DEFAULT_THETA = 10_000.0
_PASSED_OVER = ("attn_factor", "finetuned")  # of the first YaRN checkpoints; transformers computes without them too
_SCALED_FROM_ORIGINAL = ("llama3", "yarn")  # types that compare wavelengths with the context of pre-training

PositiveFloat = Annotated[float, Meta(gt=0)]
PositiveInt = Annotated[int, Meta(ge=1)]
ScaleFactor = Annotated[float, Meta(ge=1)]


class Rope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="rope_type", tag="default"):
    """RoFormer's frequencies: theta to the power of -2i / head_dim."""

    rope_theta: PositiveFloat

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """Radians a position, [head_dim / 2] float32."""
        return 1.0 / self.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)

    @property
    def magnitude(self) -> float:
        """The factor of rotated queries and keys."""
        return 1.0

    def max_positions(self, configured: int) -> int:
        """Positions that the model can tell apart, if its configuration says `configured`."""
        return configured


class LinearRope(Rope, frozen=True, kw_only=True, tag="linear"):
    """Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation"."""

    factor: ScaleFactor

    def frequencies(self, head_dim: int) -> torch.Tensor:
        return super().frequencies(head_dim) / self.factor


class DynamicRope(Rope, frozen=True, kw_only=True, tag="dynamic"):
    """NTK-aware scaling of bloc97 and emozilla, 2023. It begins past `max_position_embeddings`, so never here."""

    factor: ScaleFactor


class Llama3Rope(Rope, frozen=True, kw_only=True, tag="llama3"):
    """Llama 3.1's: `apply_scaling` of Meta's reference implementation (llama-models, models/llama3/model.py).

    Wavelengths above original / low_freq_factor are stretched, those below original / high_freq_factor are not, and
    between the two the frequency is mixed.
    """

    factor: ScaleFactor
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: PositiveInt

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor is not above low_freq_factor")

    def frequencies(self, head_dim: int) -> torch.Tensor:
        plain = super().frequencies(head_dim)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)  # over the original context
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - kept) * plain / self.factor + kept * plain


class YarnRope(Rope, frozen=True, kw_only=True, tag="yarn"):
    """Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models", sections 3.2 and 3.4.

    Dimensions that turn more than `beta_fast` times over the original context are kept, those that turn less than
    `beta_slow` times are stretched, and between the two the mixture is linear in the dimension.
    """

    factor: ScaleFactor
    original_max_position_embeddings: PositiveInt
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None
    mscale: float | None = None  # DeepSeek's two: their ratio replaces the paper's magnitude
    mscale_all_dim: float | None = None
    truncate: bool = True  # the two dimensions to whole numbers

    def frequencies(self, head_dim: int) -> torch.Tensor:
        plain = super().frequencies(head_dim)
        low = self._dimension_of(self.beta_fast or 32.0, head_dim)
        high = self._dimension_of(self.beta_slow or 1.0, head_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or 0.001
        stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        return plain / self.factor * stretched + plain * (1 - stretched)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def max_positions(self, configured: int) -> int:
        """The stretched context: checkpoints extended by YaRN may still name the one they were trained on."""
        return max(configured, int(self.factor * self.original_max_position_embeddings))

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def _dimension_of(self, num_turns: float, head_dim: int) -> float:
        """The dimension that turns a number of times over the original context."""
        wavelengths = self.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(self.rope_theta))


AnyRope = Rope | LinearRope | DynamicRope | Llama3Rope | YarnRope


def normalise_rope(config: Mapping[str, Any], default_theta: float = DEFAULT_THETA) -> dict[str, Any]:
    """A copy of `config.json` whose rope section has the fields of `AnyRope`, under the name it had, if it had any.

    Transformers has written `rope_theta` beside `rope_scaling`, later both into `rope_parameters`; `type` is the old
    word for `rope_type`.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    section = config.get(name) or {}
    if not isinstance(section, dict):
        return dict(config)
    config = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_parameters")}
    fields = {"rope_theta": config.get("rope_theta", default_theta), "rope_type": section.get("type", "default")}
    fields |= {key: value for key, value in section.items() if key not in ("type", *_PASSED_OVER)}
    if fields["rope_type"] in _SCALED_FROM_ORIGINAL:
        fields.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        if "original_max_position_embeddings" in config:
            fields["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    share = fields.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1):
        fields["partial_rotary_factor"] = share  # which no struct has: refused by name
    return {**config, name: fields}


@dataclass(frozen=True)
class Rotation:
    """The rotations of some tokens."""

    table: "RotationTable"
    positions: torch.Tensor  # [tokens] int64

    @cached_property
    def cos(self) -> torch.Tensor:
        """[tokens, 1, head_dim / 2] float32."""
        return self.table.cos.index_select(0, self.positions)[:, None]

    @cached_property
    def sin(self) -> torch.Tensor:
        return self.table.sin.index_select(0, self.positions)[:, None]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Heads [tokens, heads, head_dim] -> the same, turned; computed in float32."""
        first, second = x.float().chunk(2, -1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, -1).to(x.dtype)


class RotationTable:
    """Cosines and sines of the positions that are served: those of one have the same bits whatever the batch."""

    def __init__(self, rope: Rope, head_dim: int, num_positions: int, device: torch.device) -> None:
        angles = torch.arange(num_positions, dtype=torch.float32).outer(rope.frequencies(head_dim))
        self.cos = (angles.cos() * rope.magnitude).to(device)  # [num_positions, head_dim / 2]
        self.sin = angles.sin_().mul_(rope.magnitude).to(device)

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotations of tokens at `positions` [tokens]."""
        return Rotation(self, positions)


class _Descriptor(ctypes.Structure):
    """`Turn` of kernels/cpp/pointwise.cpp."""

    _fields_ = (
        ("query_weight", ctypes.c_void_p),
        ("key_weight", ctypes.c_void_p),
        ("num_query_heads", ctypes.c_int64),
        ("num_key_heads", ctypes.c_int64),
        ("num_merged_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
    )


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys and values [tokens, heads, head_dim]


class QueryKeyRotation:
    """Rotates queries and keys, and norms each head before, where the model has norms of heads.

    One call of kernels/cpp/pointwise.cpp or triton_kernels/pointwise.py, else torch, with which the tests compare them.
    It computes in float32, and gives a row the same bits whatever other rows there are.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        norms: tuple[torch.Tensor, torch.Tensor] | None,  # weights [head_dim] of the RMSNorms of queries and of keys
        epsilon: float,
        placement: Placement,
        *,
        turns: bool = True,  # else it does nothing but split rows into heads, and there are no norms
    ) -> None:
        assert turns or norms is None
        self._spec = spec
        self._turns = turns
        self._has_triton = placement.has_triton
        self._epsilon = epsilon
        self._weights = None
        if norms is not None:
            query, key = (weight.to(placement.device, torch.float32, copy=True) for weight in norms)
            self._weights = query, key
        pointer = ctypes.c_void_p
        argtypes = (ctypes.POINTER(_Descriptor), pointer, ctypes.c_int64, *[pointer] * 3)
        self._compiled = placement.compiled("turn_heads", *argtypes)
        self._descriptor = _Descriptor(
            *(weight.data_ptr() for weight in self._weights) if self._weights else (None, None),
            *(spec.num_heads, spec.num_kv_heads, spec.num_merged_heads, spec.head_dim),
            epsilon,
        )
        self._reference = ctypes.byref(self._descriptor)

    def __call__(self, merged: torch.Tensor, rotation: Rotation) -> Heads:
        """Merged rows [tokens, heads * head_dim] -> queries, keys and values [tokens, heads, head_dim].

        It may change `merged`, and return views of it.
        """
        spec = self._spec
        first_key, first_value = spec.num_heads, spec.num_heads + spec.num_kv_heads
        heads = merged.view(-1, spec.num_merged_heads, spec.head_dim)
        q, k, v = heads[:, :first_key], heads[:, first_key:first_value], heads[:, first_value:]
        if not self._turns:
            return q, k, v
        if self._compiled is not None:
            self._by_compiled(self._compiled, merged, rotation)
        elif self._has_triton:
            from roseinfer.model.triton_kernels.pointwise import Turns, turn_heads

            turns = Turns(rotation.table.cos, rotation.table.sin, rotation.positions)
            turn_heads(heads, spec.num_heads, spec.num_kv_heads, turns, self._weights, self._epsilon)
        else:
            if self._weights is not None:
                q, k = (self._normed(x, weight) for x, weight in zip((q, k), self._weights, strict=True))
            return rotation(q), rotation(k), v
        return q, k, v

    def _by_compiled(self, turn: Callable[..., None], merged: torch.Tensor, rotation: Rotation) -> None:
        assert merged.is_contiguous()
        table = rotation.table
        turn(
            *(self._reference, merged.data_ptr(), merged.shape[0]),
            *(table.cos.data_ptr(), table.sin.data_ptr(), rotation.positions.data_ptr()),
        )

    def _normed(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = heads.float().flatten(0, 1)
        return functional.rms_norm(rows, weight.shape, weight, self._epsilon).to(heads.dtype).view(heads.shape)
