"""GPT-2: hidden rows of token ids and positions, and logits of hidden rows.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; checkpoints as Hugging Face stores them.
"""

import msgspec
import torch

from roseinfer.model.attention.base import Attend, AttentionSpec
from roseinfer.model.device import Placement
from roseinfer.model.families.causal_lm import LayerReader
from roseinfer.model.layers.activation import Activation
from roseinfer.model.layers.linear import Embedding, Linear
from roseinfer.model.layers.norm import LinearNorm, Norm
from roseinfer.model.layers.rope import PositiveInt
from roseinfer.model.weights.checkpoint import Checkpoint

_ACTIVATIONS: dict[str, Activation] = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_CAUSAL_MASKS = (".attn.bias", ".attn.masked_bias")  # buffers that old checkpoints carry along


class GPT2Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `config.json` that shape the computation, under their names there."""

    vocab_size: PositiveInt
    n_positions: PositiveInt
    n_embd: PositiveInt
    n_layer: PositiveInt
    n_head: PositiveInt
    n_inner: PositiveInt | None = None
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
    def max_positions(self) -> int:
        return self.n_positions

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
        self.mlp_norm = LinearNorm(self.attention_out, read.norm(f"{prefix}ln_2", width), read.placement)
        self.up = read.linear(f"{prefix}mlp.c_fc", width, inner, _ACTIVATIONS[spec.activation_function])
        self.down = read.linear(f"{prefix}mlp.c_proj", inner, width)


class _Reader(LayerReader):
    """Reads GPT-2's tensors into layers."""

    def norm(self, name: str, width: int) -> Norm:
        weight, bias = self.tensor(f"{name}.weight", width), self.tensor(f"{name}.bias", width)
        return Norm(weight, bias, self.epsilon, self.placement)

    def linear(self, name: str, num_inputs: int, num_outputs: int, activation: Activation = "none") -> Linear:
        # GPT-2 was written with one-dimensional convolutions, whose weights are [inputs, outputs].
        weight = self.tensor(f"{name}.weight", num_inputs, num_outputs).t()
        bias = self.tensor(f"{name}.bias", num_outputs)
        return Linear(weight, bias, self.placement, activation, order=self.order(name))


class GPT2:
    """The model, in the placement's dtype with a float32 residual stream."""

    model_type = "gpt2"
    is_capturable = True

    def __init__(self, spec: GPT2Spec, checkpoint: Checkpoint, placement: Placement) -> None:
        # The original checkpoints hold the bare transformer, later ones the language model around it.
        prefix = "" if "ln_f.weight" in checkpoint.names else "transformer."
        read = _Reader(checkpoint, placement, spec.layer_norm_epsilon, prefix)
        self.vocab_size = spec.vocab_size
        self.max_positions = spec.max_positions
        self.attention_spec = spec.attention
        self._token_embedding, self.head = read.embedding_and_head(
            "wte.weight", (spec.vocab_size, spec.n_embd), is_tied=spec.tie_word_embeddings
        )
        self._position_embedding = Embedding(read.tensor("wpe.weight", spec.n_positions, spec.n_embd), placement)
        self._blocks = [_Block(spec, read, f"h.{layer}.") for layer in range(spec.n_layer)]
        first = self._blocks[0]
        self.layer_linears = [first.qkv, first.attention_out, first.up, first.down]
        self._final_norm = read.norm("ln_f", spec.n_embd)
        self.num_parameters = read.num_parameters
        checkpoint.check_all_read(ignored=(*_CAUSAL_MASKS, "lm_head.weight"))

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self._token_embedding.plus(token_ids, positions, self._position_embedding)
        delta = None  # not yet in the residual stream: the next norm adds it
        for layer, block in enumerate(self._blocks):
            qkv = block.qkv(block.attention_norm(x, delta))
            q, k, v = qkv.view(x.shape[0], 3, self.attention_spec.num_heads, -1).unbind(1)
            attended = attend(layer, q, k, v)
            if wanted is not None and block is self._blocks[-1]:
                attended, x = attended.index_select(0, wanted), x.index_select(0, wanted)
            delta = block.down(block.up(block.mlp_norm(attended, x)))
        return self._final_norm(x, delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)
