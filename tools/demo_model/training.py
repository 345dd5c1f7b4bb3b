"""A stream of token ids into a trained network, and a network into its loss.

Knows nothing about text. Windows are short, because that is cheap, and at random position offsets, so that every
position embedding is trained; a share of the steps takes windows of the whole context, so that attention learns to
look back that far.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from demo_model.network import Gpt2


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. Every step reads `tokens_per_step` tokens; `long_share` of the steps in whole-context windows."""

    steps: int
    seed: int = 0
    tokens_per_step: int = 4096
    window: int = 256
    long_share: float = 0.15
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    final_fraction: float = 0.02
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    clip_norm: float = 1.0
    dropout: float = 0.0

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `final_fraction` of the peak at the last step."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * cosine)


class Windows:
    """Random windows of the stream: ids, positions and targets, each [rows, length]."""

    def __init__(self, stream: Tensor, context: int, recipe: Recipe) -> None:
        self._stream, self._context, self._recipe = stream, context, recipe
        self._random = torch.Generator().manual_seed(recipe.seed)

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """The next batch. Half of the short windows start at position 0, as prompts do, half anywhere they fit."""
        is_long = self._uniform() < self._recipe.long_share
        length = self._context if is_long else self._recipe.window
        rows = self._recipe.tokens_per_step // length
        starts = self._integers(len(self._stream) - length, rows)
        offsets = self._integers(self._context - length + 1, rows)
        offsets[: rows // 2] = 0
        span = torch.arange(length)
        index = starts[:, None] + span
        return self._stream[index], offsets[:, None] + span, self._stream[index + 1]

    def _uniform(self) -> float:
        return torch.rand((), generator=self._random).item()

    def _integers(self, high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=self._random)


def train(
    model: Gpt2, stream: Tensor, recipe: Recipe, on_step: Callable[[int, float], None], steps: int | None = None
) -> float:
    """Trains in place, for the first `steps` of the recipe (default: all); the seconds it took.

    `on_step` is told the number of steps done and the training loss of the last one, in nats per token.
    """
    windows = Windows(stream, model.shape.context, recipe)
    optimizer = _optimizer(model, recipe)
    model.train()
    started = time.perf_counter()
    for step in range(steps or recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        ids, positions, targets = windows.draw()
        loss = F.cross_entropy(model(ids, positions).flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        on_step(step + 1, loss.item())
    model.eval()
    return time.perf_counter() - started


def _optimizer(model: Gpt2, recipe: Recipe) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]  # biases and norms are not decayed
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas, fused=True)


@torch.inference_mode()
def mean_loss(model: Gpt2, stream: Tensor, max_windows: int = 64) -> float:
    """Nats per token over whole-context windows, side by side, spread evenly over the stream when there are more."""
    context = model.shape.context
    starts = range(0, len(stream) - context, context)
    chosen = starts[:: max(1, len(starts) // max_windows)]
    positions = torch.arange(context)[None]
    losses = [
        F.cross_entropy(model(stream[None, s : s + context], positions)[0], stream[s + 1 : s + context + 1])
        for s in chosen
    ]
    return torch.stack(losses).mean().item()
