"""What the runner needs of a model family, and how a family reads its layers from a checkpoint."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import msgspec
import torch

from roseinfer.errors import ConfigError
from roseinfer.model.attention.base import Attend, AttentionSpec
from roseinfer.model.device import Placement
from roseinfer.model.layers.linear import Embedding, Linear
from roseinfer.model.weights.checkpoint import Checkpoint

Spec = TypeVar("Spec", bound=msgspec.Struct)


class CausalLM(Protocol):
    """A model: hidden rows of token ids, logits of hidden rows, and the shapes around them."""

    model_type: str
    vocab_size: int
    max_positions: int  # who serves fewer sets it before the first step
    attention_spec: AttentionSpec
    num_parameters: int
    is_capturable: bool  # a CUDA graph can hold `forward` and `logits`, and `steps/replay.py` can repeat them
    layer_linears: list[Linear]  # run with one row a token; at least one of each shape

    @property
    def head(self) -> Linear:
        """The linear run with one row a sampled token."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Ids and positions [tokens] -> hidden rows [tokens, width] behind the final norm, as the head takes them.

        `wanted`, int64 indices of at least one token: the rows of these alone. Behind its attention the last layer need
        not compute the others.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden rows [rows, width] -> logits [rows, vocab_size], float32 where linears have a choice."""


def read_spec(config: Mapping[str, Any], spec_type: type[Spec], checkpoint: Checkpoint) -> Spec:
    """The fields of config.json that a family needs. Raises ConfigError for a value that it does not support."""
    try:
        return msgspec.convert(config, spec_type)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{checkpoint.directory}/config.json: {error}.", param="model.path") from error


class LayerReader:
    """Reads tensors of a checkpoint into layers, and counts their parameters."""

    def __init__(self, checkpoint: Checkpoint, placement: Placement, epsilon: float, prefix: str = "") -> None:
        self.checkpoint = checkpoint
        self.placement = placement
        self.epsilon = epsilon  # of the norms
        self.prefix = prefix  # of every name but the head's
        self.num_parameters = 0

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._counted(self.checkpoint.tensor(self.prefix + name, shape))

    def order(self, *modules: str) -> torch.Tensor | None:
        """See `Checkpoint.input_order`: that of the weights of these modules."""
        return self.checkpoint.input_order(*(f"{self.prefix}{module}.weight" for module in modules))

    def embedding_and_head(self, name: str, shape: tuple[int, int], *, is_tied: bool) -> tuple[Embedding, Linear]:
        """The embedding called `name`, and the linear of logits.

        Its weight is `lm_head.weight`, or that of the embedding if it is tied and the file agrees; of two that are tied
        a file may have either. A bare model, whose names have no prefix, needs no head: its rows are for embeddings.
        """
        names = self.checkpoint.names
        is_tied = is_tied or (not self.prefix and "lm_head.weight" not in names)
        stored = self.prefix + name
        if is_tied and stored not in names and "lm_head.weight" in names:
            stored = "lm_head.weight"
        table = self._counted(self.checkpoint.tensor(stored, shape))
        if is_tied and not self.checkpoint.has_other_values("lm_head.weight", stored, shape):
            head = Linear(table, None, self.placement, dtype=torch.float32)
            return Embedding(table, self.placement, head), head
        weight = self._counted(self.checkpoint.tensor("lm_head.weight", shape))
        order = self.checkpoint.input_order("lm_head.weight")
        return Embedding(table, self.placement), Linear(weight, None, self.placement, dtype=torch.float32, order=order)

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_parameters += tensor.numel()
        return tensor
