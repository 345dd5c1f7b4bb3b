"""GPT-2 in plain torch, with the parameter names of Hugging Face's checkpoints.

Architecture: Radford et al. 2019, "Language Models are
Unsupervised Multitask Learners"; initialisation from section 2.3 of it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # HF's Conv1D holds [in, out], nn.Linear [out, in]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the network. `width` is a multiple of `num_heads`."""

    vocab_size: int = 2048
    context: int = 1024
    width: int = 192
    num_layers: int = 4
    num_heads: int = 3


class Attention(nn.Module):
    """Causal self-attention, all heads at once. [batch, length, width] -> the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> [batch, length, width]."""
        batch, length, width = x.shape
        qkv = self.c_attn(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, head width]
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Two linears around the tanh form of GELU (`gelu_new`)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.width, 4 * shape.width)
        self.c_proj = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> [batch, length, width]."""
        return self.c_proj(gelu(self.c_fc(x), approximate="tanh"))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer, normalised before attention and before the MLP."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.mlp = Mlp(shape)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> [batch, length, width]."""
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Everything below the output projection."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab_size, shape.width)
        self.wpe = nn.Embedding(shape.context, shape.width)
        self.h = nn.ModuleList(Block(shape, dropout) for _ in range(shape.num_layers))
        self.ln_f = nn.LayerNorm(shape.width)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Token ids and positions, both [batch, length] -> [batch, length, width]."""
        x: Tensor = self.wte(ids) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        return self.ln_f(x)  # type: ignore[no-any-return]


class Gpt2(nn.Module):
    """The language model; the output projection is the token embedding, transposed."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.transformer = Transformer(shape, dropout)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                depth_scale = math.sqrt(2 * shape.num_layers) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 / depth_scale)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Token ids and positions, both [batch, length] -> logits [batch, length, vocabulary]."""
        return linear(self.transformer(ids, positions), self.transformer.wte.weight)

    @property
    def num_parameters(self) -> int:
        """Trained numbers; the tied output projection counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def checkpoint(self) -> dict[str, Tensor]:
        """The parameters as Hugging Face names and orients them, in bfloat16."""
        return {
            name: (value.T if name.endswith(_TRANSPOSED) else value).to(torch.bfloat16).contiguous()
            for name, value in self.state_dict().items()
        }

    def load_checkpoint(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `checkpoint`."""
        self.load_state_dict(
            {name: (value.T if name.endswith(_TRANSPOSED) else value).float() for name, value in tensors.items()}
        )

    @torch.inference_mode()
    def continue_greedily(self, ids: list[int], num_tokens: int, stop_id: int) -> list[int]:
        """Up to `num_tokens` more ids, each the most likely; ends early at `stop_id`, which is not returned."""
        ids = list(ids)
        start = len(ids)
        while len(ids) < min(start + num_tokens, self.shape.context):
            logits = self(torch.tensor([ids]), torch.arange(len(ids))[None])
            token_id = int(logits[0, -1].argmax())
            if token_id == stop_id:
                break
            ids.append(token_id)
        return ids[start:]
