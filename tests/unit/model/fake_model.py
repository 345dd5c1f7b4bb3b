"""A model and an attention that read a step's integers on the device alone, and a runner over them. For tests.

Both compute row by row, without matrix products, so that a token has the same bits whatever else is in its step: two
runs of one request differ only if the runner gave it other integers, or another's memory.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from roseinfer.config.options import RunnerConfig
from roseinfer.messages import EngineInfo
from roseinfer.model.attention.base import Attend, AttentionBackend, AttentionSpec, DeviceTokens, PackedTokens
from roseinfer.model.attention.kv_cache import KVCache
from roseinfer.model.attention.reference import ReferenceAttention
from roseinfer.model.device import LinearKind, Placement
from roseinfer.model.device_stream import Stream
from roseinfer.model.families.causal_lm import CausalLM
from roseinfer.model.families.registry import build_model
from roseinfer.model.layers.linear import Linear
from roseinfer.model.loading import LoadedModel, OnProgress
from roseinfer.model.runner import ModelRunner, RunnerLimits
from roseinfer.model.weights.checkpoint import Checkpoint

VOCAB_SIZE = 61
MAX_MODEL_LEN = 64
BLOCK_SIZE = 8
NUM_BLOCKS = 40
HEAD_DIM = 8


class Unpadded(Placement):
    """A CPU whose linears take any number of rows, as those of a GPU do."""

    def padded_rows(self, num_rows: int) -> int:
        return num_rows


class Interpreted(Unpadded):
    """A GPU's linears, and its kernels for norms, rotations and gates, for a process that interprets these."""

    @property
    def linears(self) -> LinearKind:
        return "torch"

    @property
    def has_triton(self) -> bool:
        return True


UNPADDED = Unpadded(torch.device("cpu"), torch.float32)


class DeviceAttention:
    """Attention of one head from `tokens.device`, in operators that a graph can hold.

    Tokens past the last row are not a number, and are written into the spare block.
    """

    name = "fake"
    is_capturable = True

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def prepare(self, tokens: PackedTokens) -> Attend:
        device = tokens.device
        assert device is not None

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self._attend(device, layer, q[:, 0], k[:, 0], v[:, 0])

        return attend

    def _attend(
        self, tokens: DeviceTokens, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        index = torch.arange(len(q), dtype=torch.int32)
        is_token = index < tokens.query_starts[-1]
        rows = (torch.searchsorted(tokens.query_starts, index, right=True) - 1).clamp(max=len(tokens.starts) - 1)
        size, positions = self.cache.block_size, (tokens.starts[rows] + index - tokens.query_starts[rows]).long()
        positions = positions.where(is_token, 0)
        blocks = tokens.block_table[tokens.slots[rows]].long()  # [tokens, max_blocks]
        own = blocks.gather(1, (positions // size).unsqueeze(-1)).squeeze(-1).where(is_token, self.cache.num_blocks - 1)
        keys, values = self.cache.keys[layer][:, 0], self.cache.values[layer][:, 0]  # [blocks, block_size, head_dim]
        keys.index_put_((own, positions % size), k)
        values.index_put_((own, positions % size), v)
        scores = (keys[blocks].flatten(1, 2) * q.unsqueeze(1)).sum(-1)  # [tokens, positions]
        is_hidden = torch.arange(scores.shape[1]) > positions.unsqueeze(-1)
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        mixed = weights.masked_fill(is_hidden, 0).unsqueeze(-1) * values[blocks].flatten(1, 2)
        return mixed.nan_to_num().sum(1).where(is_token.unsqueeze(-1), torch.nan)


class RowModel:
    """A model of one layer and one head."""

    model_type = "fake"
    max_positions = MAX_MODEL_LEN
    num_parameters = 0
    attention_spec = AttentionSpec(1, 1, HEAD_DIM, 1.0, (None,))
    is_capturable = True

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self.vocab_size = vocab_size
        self.layer_linears: list[Linear] = []
        generator = torch.Generator().manual_seed(5)
        self._tokens = torch.randn(vocab_size, HEAD_DIM, generator=generator)
        self._positions = torch.randn(MAX_MODEL_LEN, HEAD_DIM, generator=generator)
        self._head = torch.randn(vocab_size, HEAD_DIM, generator=generator)

    @property
    def head(self) -> Linear:
        raise AssertionError("nothing is built for numbers of rows that are taken as they come")

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self._tokens[token_ids] + self._positions[positions]
        heads = x.unsqueeze(1)
        x = x + attend(0, heads, heads * 0.5, heads)
        return x if wanted is None else x.index_select(0, wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden.unsqueeze(1) * self._head).sum(-1)


Parts = tuple[CausalLM, AttentionBackend]


def row_model(vocab_size: int = VOCAB_SIZE) -> Parts:
    """A model and an attention that a graph can hold, and that are exact."""
    model = RowModel(vocab_size)
    return model, DeviceAttention(_new_cache(model))


def read_model(directory: Path, attention: str) -> Parts:
    """A checkpoint's model and attention: with kernels, if that is `triton`, or `reference`, all in torch."""
    placement = UNPADDED if attention == "reference" else Interpreted(UNPADDED.device, UNPADDED.dtype)
    with Checkpoint(directory) as checkpoint:
        model = build_model(checkpoint, placement)
    cache = _new_cache(model)
    if attention == "reference":
        return model, ReferenceAttention(cache, model.attention_spec)
    from roseinfer.model.attention.triton import TritonAttention

    return model, TritonAttention(cache, model.attention_spec)


def _new_cache(model: CausalLM) -> KVCache:
    """With one block more than a scheduler would know of."""
    return KVCache(model.attention_spec, NUM_BLOCKS + 1, BLOCK_SIZE, UNPADDED)


def make_runner(
    stream: Stream,
    config: RunnerConfig | None = None,
    num_slots: int = 12,
    on_progress: OnProgress = lambda *_: None,
    make_model: Callable[[], Parts] = row_model,
    max_decode_rows: int | None = None,
) -> ModelRunner:
    """A runner on a device of a test's own."""
    model, attention = make_model()
    info = EngineInfo(
        checkpoint_dir="",
        model_type=model.model_type,
        num_parameters=0,
        vocab_size=model.vocab_size,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[],
        device="cpu",
        dtype="float32",
        attention=attention.name,
        linear="fake",
        num_threads=1,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        startup_s={},
    )
    loaded = LoadedModel(model, attention, UNPADDED, info)
    limits = RunnerLimits(num_slots, max_decode_rows or num_slots, max_tokens=4 * MAX_MODEL_LEN)
    return ModelRunner(loaded, stream, limits, config or RunnerConfig(), on_progress)
