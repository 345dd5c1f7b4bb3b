"""Llama 3, Mistral, Qwen2 and Qwen3: token ids and positions into hidden rows, those into logits. Knows no pages.

Grattafiori et al. 2024, "The Llama 3 Herd of Models"; Jiang et al. 2023, "Mistral 7B"; Qwen team, "Qwen2 Technical
Report" (2024) and "Qwen3 Technical Report" (2025); checkpoints as Hugging Face stores them. The four are one
computation; what a spec says of biases, norms of heads and windows is all that differs.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
import torch
from msgspec import Meta

from roseinfer.errors import ConfigError
from roseinfer.model.attention.base import Attend, AttentionSpec
from roseinfer.model.checkpoint import Checkpoint
from roseinfer.model.kv_cache import CacheShape
from roseinfer.model.layers.embedding import Embedding, Linear, Placement, RMSNorm
from roseinfer.model.layers.pointwise import HeadCounts, HeadNorms, HeadTurner, SiluGate
from roseinfer.model.layers.rope import AnyRope, PositiveFloat, PositiveInt, Rope, RotationTable, normalise_rope

_FREQUENCY_BUFFERS = (".rotary_emb.inv_freq",)  # that old checkpoints carry along
_DEFAULT_WINDOW = 4096  # where a configuration is silent; null is no window


class FamilySpec(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `config.json` that shape the computation of all four, under their names there."""

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
    hidden_act: Literal["silu"] = "silu"
    tie_word_embeddings: bool = False
    rope_parameters: AnyRope | None = None
    rope_scaling: AnyRope | None = None
    quantization_config: None = None

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
    def has_qkv_bias(self) -> bool:
        return False

    @property
    def has_output_bias(self) -> bool:
        return False

    @property
    def has_mlp_bias(self) -> bool:
        return False

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
            scale=self.head_width**-0.5,
            windows=tuple(None if window is None or window >= limit else window for window in self.windows),
        )


class LlamaSpec(FamilySpec, frozen=True, kw_only=True):
    """Llama: biases where the configuration asks for them."""

    model_type = "llama"

    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def has_qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def has_output_bias(self) -> bool:
        return self.attention_bias

    @property
    def has_mlp_bias(self) -> bool:
        return self.mlp_bias


class WindowedSpec(FamilySpec, frozen=True, kw_only=True):
    """A family in which some layers have a window: those that `layer_types` lists, or the family's own choice."""

    sliding_window: PositiveInt | None = _DEFAULT_WINDOW
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError("layer_types has not num_hidden_layers entries")

    @property
    def window(self) -> int | None:
        """The window of the layers that have one."""
        return self.sliding_window

    @property
    def first_window_layer(self) -> int:
        """The first of the layers with a window where there is no `layer_types`."""
        return 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        if self.layer_types is None:
            slides = [layer >= self.first_window_layer for layer in range(self.num_hidden_layers)]
        else:
            slides = [kind == "sliding_attention" for kind in self.layer_types]
        return tuple(self.window if slide else None for slide in slides)


class MistralSpec(WindowedSpec, frozen=True, kw_only=True):
    """Mistral: one window for all layers, or, as in Ministral, for those that `layer_types` lists."""

    model_type = "mistral"


class Qwen2Spec(WindowedSpec, frozen=True, kw_only=True):
    """Qwen2: a bias on queries, keys and values; a window for some layers, if it is switched on."""

    model_type = "qwen2"

    use_sliding_window: bool = False
    max_window_layers: Annotated[int, Meta(ge=0)] = 28

    @property
    def has_qkv_bias(self) -> bool:
        return True

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    @property
    def first_window_layer(self) -> int:
        return self.max_window_layers


class Qwen3Spec(Qwen2Spec, frozen=True, kw_only=True):
    """Qwen3: heads of a size of their own, norms of queries and keys, biases where the configuration asks for them."""

    model_type = "qwen3"
    has_head_norms = True

    head_dim: Annotated[int, Meta(ge=2, multiple_of=2)] | None = 128
    attention_bias: bool = False

    @property
    def has_qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def has_output_bias(self) -> bool:
        return self.attention_bias


class _Block:
    """The weights of one layer: attention and MLP, each behind its norm."""

    def __init__(self, spec: FamilySpec, read: "_Reader", prefix: str) -> None:
        width, inner = spec.hidden_size, spec.intermediate_size
        counts = HeadCounts(spec.num_attention_heads, spec.num_kv_heads, spec.head_width)
        q, kv = counts.num_heads * counts.head_dim, counts.num_kv_heads * counts.head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        self.attention_norm = read.norm(f"{prefix}input_layernorm", width)
        projections = {f"{attention}q_proj": q, f"{attention}k_proj": kv, f"{attention}v_proj": kv}
        self.qkv = read.linear(projections, width, spec.has_qkv_bias)
        norms = read.head_norms(attention, counts.head_dim) if spec.has_head_norms else None
        self.turn_heads = HeadTurner(counts, norms, read.placement)
        self.attention_out = read.linear({f"{attention}o_proj": width}, q, spec.has_output_bias)
        self.mlp_norm = read.norm(f"{prefix}post_attention_layernorm", width)
        self.gate_up = read.linear({f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}, width, spec.has_mlp_bias)
        self.down = read.linear({f"{mlp}down_proj": width}, inner, spec.has_mlp_bias)


class _Reader:
    """Names of tensors into layers. Tensors that are used together are joined into one linear."""

    def __init__(self, spec: FamilySpec, checkpoint: Checkpoint, placement: Placement) -> None:
        self._epsilon = spec.rms_norm_eps
        self._checkpoint = checkpoint
        self.placement = placement
        self.num_parameters = 0

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name, shape)
        self.num_parameters += tensor.numel()
        return tensor

    def norm(self, name: str, width: int) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight", width), self._epsilon, self.placement)

    def head_norms(self, prefix: str, head_dim: int) -> HeadNorms:
        query, key = (self.tensor(f"{prefix}{name}.weight", head_dim) for name in ("q_norm", "k_norm"))
        return HeadNorms(query, key, self._epsilon)

    def linear(
        self, num_outputs: dict[str, int], num_inputs: int, has_bias: bool, dtype: torch.dtype | None = None
    ) -> Linear:
        """One linear of the modules that `num_outputs` names, one below the other; `dtype` as `Linear` has it."""
        weight = self._joined({f"{name}.weight": (rows, num_inputs) for name, rows in num_outputs.items()})
        bias = self._joined({f"{name}.bias": (rows,) for name, rows in num_outputs.items()}) if has_bias else None
        return Linear(weight, bias, self.placement, is_mapped=len(num_outputs) == 1, dtype=dtype)

    def _joined(self, shapes: dict[str, tuple[int, ...]]) -> torch.Tensor:
        joined = self._checkpoint.joined(shapes, self.placement.device)
        self.num_parameters += joined.numel()
        return joined


class Llama:
    """A model of the family, in the placement's dtype with a float32 residual stream."""

    def __init__(
        self, spec_type: type[FamilySpec], config: dict[str, Any], checkpoint: Checkpoint, placement: Placement
    ) -> None:
        try:
            spec = msgspec.convert(normalise_rope(config), spec_type)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{checkpoint.directory}/config.json: {error}.", param="model.path") from error
        read = _Reader(spec, checkpoint, placement)
        self.model_type = spec.model_type
        self.vocab_size = spec.vocab_size
        self.max_positions = spec.max_positions
        self.attention_spec = spec.attention
        self.cache_shape = CacheShape(spec.num_hidden_layers, spec.num_kv_heads, spec.head_width)
        shape = (spec.vocab_size, spec.hidden_size)
        table = read.tensor("model.embed_tokens.weight", *shape)
        self._token_embedding = Embedding(table, placement)
        self._rotations = RotationTable(spec.rope, spec.head_width, spec.max_positions, placement.device)
        self._gate = SiluGate(placement)
        self._blocks = [_Block(spec, read, f"model.layers.{layer}.") for layer in range(spec.num_hidden_layers)]
        self._final_norm = read.norm("model.norm", spec.hidden_size)
        is_tied = spec.tie_word_embeddings
        if is_tied and not checkpoint.has_other_values("lm_head.weight", "model.embed_tokens.weight", shape):
            self.head = Linear(self._token_embedding.table, None, placement, is_mapped=False, dtype=torch.float32)
        else:
            self.head = read.linear({"lm_head": spec.vocab_size}, spec.hidden_size, has_bias=False, dtype=torch.float32)
        self.num_parameters = read.num_parameters
        checkpoint.check_all_read(ignored=(*_FREQUENCY_BUFFERS, "lm_head.weight"))

    @property
    def layer_linears(self) -> list[Linear]:
        """The linears of one layer; every layer has the same shapes."""
        first = self._blocks[0]
        return [first.qkv, first.attention_out, first.gate_up, first.down]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Ids and positions [tokens] -> hidden rows [tokens, width] float32, before the final norm."""
        x = self._token_embedding(token_ids)
        rotation = self._rotations.at(positions)
        delta = None  # what the residual stream has yet to be given: the next norm adds it on its way
        for layer, block in enumerate(self._blocks):
            q, k, v = block.turn_heads(block.qkv(block.attention_norm(x, delta)), rotation)
            delta = block.attention_out(attend(layer, q, k, v))
            delta = block.down(self._gate(block.gate_up(block.mlp_norm(x, delta))))
        return x if delta is None else x.add_(delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden rows [rows, width] -> logits [rows, vocab_size]: float32, or bfloat16 where linears give only that."""
        return self.head(self._final_norm(hidden))
