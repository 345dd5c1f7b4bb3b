"""Llama 3 and the families of its shape: hidden rows of token ids and positions, and logits of hidden rows.

Grattafiori et al. 2024, "The Llama 3 Herd of Models"; Jiang et al. 2023, "Mistral 7B"; Qwen team, "Qwen2 Technical
Report" (2024) and "Qwen3 Technical Report" (2025); IBM's Granite 3, ByteDance's Seed-OSS and Hugging Face's SmolLM3;
checkpoints as Hugging Face stores them. They are one computation and differ in biases, norms of heads, windows,
multipliers, and layers without rotations, as their specs say.
"""

from functools import cached_property
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec
import torch
from msgspec import Meta

from roseinfer.model.attention.base import Attend, AttentionSpec
from roseinfer.model.device import Placement
from roseinfer.model.families.causal_lm import LayerReader
from roseinfer.model.layers.activation import SiluGate
from roseinfer.model.layers.linear import Linear
from roseinfer.model.layers.norm import LinearNorm, Norm
from roseinfer.model.layers.rope import (
    AnyRope,
    PositiveFloat,
    PositiveInt,
    QueryKeyRotation,
    Rope,
    RotationTable,
)
from roseinfer.model.weights.checkpoint import Checkpoint

_FREQUENCY_BUFFERS = (".rotary_emb.inv_freq",)  # that old checkpoints carry along
_DEFAULT_WINDOW = 4096  # without an entry in the configuration; null is no window


class Biases(NamedTuple):
    """Which linears have a bias."""

    qkv: bool = False
    attention_out: bool = False
    mlp: bool = False


class Multipliers(NamedTuple):
    """Factors of embeddings, and of what a sublayer adds to the residual stream; what logits are divided by."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0


class FamilySpec(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `config.json` that shape the computation of all families, under their names there."""

    model_type: ClassVar[str]
    has_head_norms: ClassVar[bool] = False  # of queries and keys, each head for itself

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    max_position_embeddings: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: Annotated[int, Meta(ge=2, multiple_of=2)] | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    hidden_act: Literal["silu", "swish"] = "silu"  # two names of one function
    tie_word_embeddings: bool = False
    rope_parameters: AnyRope | None = None
    rope_scaling: AnyRope | None = None

    def __post_init__(self) -> None:
        if self.head_dim is None and self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError("hidden_size is not an even multiple of num_attention_heads")
        if self.num_attention_heads % self.num_kv_heads:
            raise ValueError("num_attention_heads is not a multiple of num_key_value_heads")

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rope(self) -> Rope:
        rope = self.rope_scaling or self.rope_parameters
        assert rope is not None, "normalise_rope writes one"
        return rope

    @property
    def max_positions(self) -> int:
        return self.rope.max_positions(self.max_position_embeddings)

    @property
    def biases(self) -> Biases:
        return Biases()

    @property
    def multipliers(self) -> Multipliers:
        return Multipliers()

    @property
    def scale(self) -> float:
        """Of the products of queries and keys."""
        return float(self.head_width**-0.5)

    @property
    def turns(self) -> tuple[bool, ...]:
        """Of each layer, whether it rotates queries and keys by their positions."""
        return (True,) * self.num_hidden_layers

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer, how many positions a token sees, its own included; None for all."""
        return (None,) * self.num_hidden_layers

    @property
    def attention(self) -> AttentionSpec:
        limit = self.max_positions  # a window that no text fills is none
        return AttentionSpec(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_width,
            scale=self.scale,
            windows=tuple(None if window is None or window >= limit else window for window in self.windows),
        )


class LlamaSpec(FamilySpec, frozen=True, kw_only=True):
    """Llama: biases where the configuration asks for them."""

    model_type = "llama"

    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def biases(self) -> Biases:
        return Biases(self.attention_bias, self.attention_bias, self.mlp_bias)


class MistralSpec(FamilySpec, frozen=True, kw_only=True):
    """Mistral: one window for all layers, or, as in Ministral, for those that `layer_types` lists."""

    model_type = "mistral"

    sliding_window: PositiveInt | None = _DEFAULT_WINDOW
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError("layer_types has not num_hidden_layers entries")

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self._windows_from(0, self.sliding_window)

    def _windows_from(self, first_layer: int, window: int | None) -> tuple[int | None, ...]:
        """`window` for the layers that `layer_types` lists; without it, for those from `first_layer` on."""
        if self.layer_types is None:
            slides = [layer >= first_layer for layer in range(self.num_hidden_layers)]
        else:
            slides = [kind == "sliding_attention" for kind in self.layer_types]
        return tuple(window if slide else None for slide in slides)


class Qwen2Spec(MistralSpec, frozen=True, kw_only=True):
    """Qwen2: a bias on queries, keys and values; a window for some layers, if it is switched on."""

    model_type = "qwen2"

    use_sliding_window: bool = False
    max_window_layers: Annotated[int, Meta(ge=0)] = 28

    @property
    def biases(self) -> Biases:
        return Biases(qkv=True)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self._windows_from(self.max_window_layers, self.sliding_window if self.use_sliding_window else None)


class Qwen3Spec(Qwen2Spec, frozen=True, kw_only=True):
    """Qwen3: heads of a size of their own, norms of queries and keys, biases where the configuration asks for them."""

    model_type = "qwen3"
    has_head_norms = True

    head_dim: Annotated[int, Meta(ge=2, multiple_of=2)] | None = 128
    attention_bias: bool = False

    @property
    def biases(self) -> Biases:
        return Biases(self.attention_bias, self.attention_bias)


class SeedOssSpec(FamilySpec, frozen=True, kw_only=True):
    """Seed-OSS: biases as Qwen2 has them, unless the configuration says otherwise."""

    model_type = "seed_oss"

    head_dim: Annotated[int, Meta(ge=2, multiple_of=2)] | None = 128
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False

    @property
    def biases(self) -> Biases:
        return Biases(self.attention_bias, self.attention_out_bias, self.mlp_bias)


class GraniteSpec(LlamaSpec, frozen=True, kw_only=True):
    """Granite: a Llama with four multipliers."""

    model_type = "granite"

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: PositiveFloat = 1.0
    logits_scaling: PositiveFloat = 1.0

    @property
    def multipliers(self) -> Multipliers:
        return Multipliers(self.embedding_multiplier, self.residual_multiplier, self.logits_scaling)

    @property
    def scale(self) -> float:
        return self.attention_multiplier


class SmolLM3Spec(LlamaSpec, frozen=True, kw_only=True):
    """SmolLM3: a Llama, some of whose layers know no positions; those have a window, if it is switched on."""

    model_type = "smollm3"

    num_key_value_heads: PositiveInt | None = 4
    tie_word_embeddings: bool = True
    no_rope_layers: list[Literal[0, 1]] | None = None  # named for the opposite: 1 is a layer that rotates
    no_rope_layer_interval: PositiveInt = 4
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = None
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, listed in (("no_rope_layers", self.no_rope_layers), ("layer_types", self.layer_types)):
            if listed is not None and len(listed) != self.num_hidden_layers:
                raise ValueError(f"{name} has not num_hidden_layers entries")

    @property
    def turns(self) -> tuple[bool, ...]:
        if self.no_rope_layers is not None:
            return tuple(map(bool, self.no_rope_layers))
        return tuple((layer + 1) % self.no_rope_layer_interval != 0 for layer in range(self.num_hidden_layers))

    @property
    def windows(self) -> tuple[int | None, ...]:
        if self.layer_types is None:
            slides = [self.use_sliding_window and not turns for turns in self.turns]
        else:  # as transformers masks them, whatever the switch says
            slides = [kind == "sliding_attention" for kind in self.layer_types]
        return tuple(self.sliding_window if slide else None for slide in slides)


class _Block:
    """The weights of one layer: attention and MLP, each behind its norm."""

    def __init__(self, spec: FamilySpec, read: "_Reader", layer: int) -> None:
        prefix = f"layers.{layer}."
        width, inner, biases = spec.hidden_size, spec.intermediate_size, spec.biases
        q, kv = spec.num_attention_heads * spec.head_width, spec.num_kv_heads * spec.head_width
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        self.attention_norm = read.norm(f"{prefix}input_layernorm", width)
        projections = {f"{attention}q_proj": q, f"{attention}k_proj": kv, f"{attention}v_proj": kv}
        self.qkv = read.linear(projections, width, biases.qkv)
        norms = None
        if spec.has_head_norms:
            query, key = (read.tensor(f"{attention}{name}.weight", spec.head_width) for name in ("q_norm", "k_norm"))
            norms = query, key
        self.rotate = QueryKeyRotation(
            spec.attention, norms, spec.rms_norm_eps, read.placement, turns=spec.turns[layer]
        )
        self.attention_out = read.linear({f"{attention}o_proj": width}, q, biases.attention_out)
        mlp_norm, factor = read.norm(f"{prefix}post_attention_layernorm", width), spec.multipliers.residual
        self.mlp_norm = LinearNorm(self.attention_out, mlp_norm, read.placement, factor)
        self.gate_up = read.linear({f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}, width, biases.mlp)
        self.down = read.linear({f"{mlp}down_proj": width}, inner, biases.mlp)


class _Reader(LayerReader):
    """Reads tensors into layers. Tensors that are used together are joined into one linear."""

    def norm(self, name: str, width: int) -> Norm:
        return Norm(self.tensor(f"{name}.weight", width), None, self.epsilon, self.placement)

    def linear(self, num_outputs: dict[str, int], num_inputs: int, has_bias: bool) -> Linear:
        """One linear of the modules that `num_outputs` names, one below the other."""
        weights = [self.tensor(f"{name}.weight", rows, num_inputs) for name, rows in num_outputs.items()]
        biases = [self.tensor(f"{name}.bias", rows) for name, rows in num_outputs.items()] if has_bias else []
        return Linear(weights, torch.cat(biases) if has_bias else None, self.placement, order=self.order(*num_outputs))


class Llama:
    """A model of the family, in the placement's dtype with a float32 residual stream."""

    is_capturable = True

    def __init__(self, spec: FamilySpec, checkpoint: Checkpoint, placement: Placement) -> None:
        prefix = "" if "embed_tokens.weight" in checkpoint.names else "model."  # as AutoModel saves it, without a head
        read = _Reader(checkpoint, placement, spec.rms_norm_eps, prefix)
        self.model_type = spec.model_type
        self.vocab_size = spec.vocab_size
        self.max_positions = spec.max_positions
        self.attention_spec = spec.attention
        shape = spec.vocab_size, spec.hidden_size
        self._token_embedding, self.head = read.embedding_and_head(
            "embed_tokens.weight", shape, is_tied=spec.tie_word_embeddings
        )
        self._rope = spec.rope
        self._device = placement.device
        self._gate = SiluGate(placement)
        self._multipliers = spec.multipliers
        self._blocks = [_Block(spec, read, layer) for layer in range(spec.num_hidden_layers)]
        first = self._blocks[0]
        self.layer_linears = [first.qkv, first.attention_out, first.gate_up, first.down]
        self._final_norm = read.norm("norm", spec.hidden_size)
        self.num_parameters = read.num_parameters
        checkpoint.check_all_read(ignored=(*_FREQUENCY_BUFFERS, "lm_head.weight"))

    @cached_property
    def _rotations(self) -> RotationTable:
        """Made by the first step: a model with a million positions, of which few are served, would make 512 MB."""
        return RotationTable(self._rope, self.attention_spec.head_dim, self.max_positions, self._device)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = _times(self._token_embedding(token_ids), self._multipliers.embedding)
        factor = self._multipliers.residual
        rotation = self._rotations.at(positions)
        delta = None  # not yet in the residual stream: the next norm adds it
        for layer, block in enumerate(self._blocks):
            q, k, v = block.rotate(block.qkv(block.attention_norm(x, delta)), rotation)
            attended = attend(layer, q, k, v)
            if wanted is not None and block is self._blocks[-1]:
                attended, x = attended.index_select(0, wanted), x.index_select(0, wanted)
            normed = block.mlp_norm(attended, x)
            delta = _times(block.down(self._gate(block.gate_up(normed))), factor)
        return self._final_norm(x, delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return _times(self.head(hidden), 1 / self._multipliers.logits)


def _times(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in place."""
    return x if factor == 1.0 else x.mul_(factor)
