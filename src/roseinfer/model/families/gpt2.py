"""GPT-2: token ids and positions into hidden rows, hidden rows into logits. Knows nothing about pages or batches.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; checkpoints as Hugging Face stores them.
"""

from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from roseinfer.errors import ConfigError
from roseinfer.model.attention.base import Attend, AttentionSpec
from roseinfer.model.checkpoint import Checkpoint
from roseinfer.model.kv_cache import CacheShape
from roseinfer.model.layers.embedding import Activation, Embedding, LayerNorm, Linear, Placement

_PositiveInt = Annotated[int, Meta(ge=1)]
_ACTIVATIONS: dict[str, Activation] = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_CAUSAL_MASKS = (".attn.bias", ".attn.masked_bias")  # buffers that old checkpoints carry along


class GPT2Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `config.json` that shape the computation, under their names there."""

    vocab_size: _PositiveInt
    n_positions: _PositiveInt
    n_embd: _PositiveInt
    n_layer: _PositiveInt
    n_head: _PositiveInt
    n_inner: _PositiveInt | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError("n_embd is not a multiple of n_head")
        if self.activation_function not in _ACTIVATIONS:
            raise ValueError(f"activation_function is {self.activation_function!r}, not one of {list(_ACTIVATIONS)}")
        if not self.scale_attn_weights or self.scale_attn_by_inverse_layer_idx:
            raise ValueError("only attention scaled by the root of the head size is supported")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def attention(self) -> AttentionSpec:
        windows = (None,) * self.n_layer
        return AttentionSpec(self.n_head, self.n_head, self.head_dim, scale=self.head_dim**-0.5, windows=windows)


class _Block:
    """The weights of one layer: attention and MLP, each behind its norm."""

    def __init__(self, spec: GPT2Spec, read: "_Reader", prefix: str) -> None:
        width, inner = spec.n_embd, spec.n_inner or 4 * spec.n_embd
        self.attention_norm = read.norm(f"{prefix}ln_1", width)
        self.qkv = read.linear(f"{prefix}attn.c_attn", width, 3 * width)
        self.attention_out = read.linear(f"{prefix}attn.c_proj", width, width)
        self.mlp_norm = read.norm(f"{prefix}ln_2", width)
        self.up = read.linear(f"{prefix}mlp.c_fc", width, inner, _ACTIVATIONS[spec.activation_function])
        self.down = read.linear(f"{prefix}mlp.c_proj", inner, width)


class _Reader:
    """Names of GPT-2 tensors into layers."""

    def __init__(self, spec: GPT2Spec, checkpoint: Checkpoint, placement: Placement) -> None:
        self._spec = spec
        self._checkpoint = checkpoint
        self._placement = placement
        # The original checkpoints hold the bare transformer, later ones the language model around it.
        self._prefix = "transformer." if "transformer.wte.weight" in checkpoint.names else ""
        self.num_parameters = 0

    def name(self, name: str) -> str:
        """A tensor's name in this checkpoint."""
        return self._prefix + name

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._checkpoint.tensor(self.name(name), shape)
        self.num_parameters += tensor.numel()
        return tensor

    def norm(self, name: str, width: int) -> LayerNorm:
        weight, bias = self.tensor(f"{name}.weight", width), self.tensor(f"{name}.bias", width)
        return LayerNorm(weight, bias, self._spec.layer_norm_epsilon, self._placement)

    def linear(self, name: str, num_inputs: int, num_outputs: int, activation: Activation = "none") -> Linear:
        # GPT-2 was written with one-dimensional convolutions, whose weights are [inputs, outputs].
        weight = self.tensor(f"{name}.weight", num_inputs, num_outputs).t()
        return Linear(weight, self.tensor(f"{name}.bias", num_outputs), self._placement, activation)


class GPT2:
    """The model, in the placement's dtype with a float32 residual stream."""

    model_type = "gpt2"

    def __init__(self, config: dict[str, Any], checkpoint: Checkpoint, placement: Placement) -> None:
        try:
            spec = msgspec.convert(config, GPT2Spec)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{checkpoint.directory}/config.json: {error}.", param="model.path") from error
        read = _Reader(spec, checkpoint, placement)
        self.vocab_size = spec.vocab_size
        self.max_positions = spec.n_positions
        self.attention_spec = spec.attention
        self.cache_shape = CacheShape(spec.n_layer, spec.n_head, spec.head_dim)
        self._token_embedding = Embedding(read.tensor("wte.weight", spec.vocab_size, spec.n_embd), placement)
        self._position_embedding = Embedding(read.tensor("wpe.weight", spec.n_positions, spec.n_embd), placement)
        self._blocks = [_Block(spec, read, f"h.{layer}.") for layer in range(spec.n_layer)]
        self._final_norm = read.norm("ln_f", spec.n_embd)
        self.num_parameters = read.num_parameters
        shape, tied_to = (spec.vocab_size, spec.n_embd), read.name("wte.weight")
        if "lm_head.weight" not in checkpoint.names or (
            spec.tie_word_embeddings and not checkpoint.has_other_values("lm_head.weight", tied_to, shape)
        ):
            table = self._token_embedding.table
            self.head = Linear(table, None, placement, is_mapped=False, dtype=torch.float32)
        else:
            head = checkpoint.tensor("lm_head.weight", shape)
            self.num_parameters += head.numel()
            self.head = Linear(head, None, placement, dtype=torch.float32)
        checkpoint.check_all_read(ignored=(*_CAUSAL_MASKS, "lm_head.weight"))

    @property
    def layer_linears(self) -> list[Linear]:
        """The linears of one layer; every layer has the same shapes."""
        first = self._blocks[0]
        return [first.qkv, first.attention_out, first.up, first.down]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Ids and positions [tokens] -> hidden rows [tokens, width] float32, before the final norm."""
        x = self._token_embedding(token_ids)
        self._position_embedding.add_to(x, positions)
        delta = None  # what the residual stream has yet to be given: the next norm adds it on its way
        for layer, block in enumerate(self._blocks):
            qkv = block.qkv(block.attention_norm(x, delta))
            q, k, v = qkv.view(x.shape[0], 3, self.attention_spec.num_heads, -1).unbind(1)
            delta = block.attention_out(attend(layer, q, k, v))
            delta = block.down(block.up(block.mlp_norm(x, delta)))
        return x if delta is None else x.add_(delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden rows [rows, width] -> logits [rows, vocab_size]: float32, or bfloat16 where linears give only that."""
        return self.head(self._final_norm(hidden))
