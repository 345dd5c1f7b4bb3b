"""Trains GPT-2 on a stream of token ids, and measures its loss.

Windows are short, because that is cheap, and at random position offsets, so that every
position embedding is trained; a share of the steps takes windows of the whole context, so that attention learns to
look back that far.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2LMHeadModel


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. Every step reads `tokens_per_step` tokens; `long_share` of the steps in whole-context windows."""

    steps: int
    seed: int = 0
    tokens_per_step: int = 2048
    window: int = 256
    long_share: float = 0.15
    learning_rate: float = 3e-3  # of embeddings, biases and norms, by AdamW
    matrix_learning_rate: float = 1e-2  # of the blocks' matrices, by Muon
    warmup_steps: int = 100
    final_fraction: float = 0.02
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    clip_norm: float = 1.0

    def learning_rate_factor(self, step: int) -> float:
        """Share of the peak: linear warm-up, then a cosine down to `final_fraction` at the last step."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.final_fraction + (1 - self.final_fraction) * cosine


class Windows:
    """Random windows of the stream: ids, positions and targets, each [rows, length]."""

    def __init__(self, stream: Tensor, context: int, recipe: Recipe) -> None:
        self._stream, self._context, self._recipe = stream, context, recipe
        self._random = torch.Generator().manual_seed(recipe.seed)

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """The next batch. Half of the short windows start at position 0, as prompts do, half anywhere they fit."""
        is_long = torch.rand((), generator=self._random).item() < self._recipe.long_share
        length = self._context if is_long else self._recipe.window
        rows = self._recipe.tokens_per_step // length
        starts = torch.randint(len(self._stream) - length, (rows,), generator=self._random)
        offsets = torch.randint(self._context - length + 1, (rows,), generator=self._random)
        offsets[: rows // 2] = 0
        span = torch.arange(length)
        index = starts[:, None] + span
        return self._stream[index], offsets[:, None] + span, self._stream[index + 1]


def train(model: GPT2LMHeadModel, stream: Tensor, recipe: Recipe, on_step: Callable[[int, float], None]) -> float:
    """Trains in place; the seconds it took.

    `on_step` gets the number of steps done and the training loss of the last one, in nats per token.
    """
    windows = Windows(stream, model.config.n_positions, recipe)
    optimizers = _optimizers(model, recipe)
    schedules = [LambdaLR(optimizer, recipe.learning_rate_factor) for optimizer in optimizers]
    model.train()
    started = time.perf_counter()
    for step in range(recipe.steps):
        ids, positions, targets = windows.draw()
        logits = model(ids, position_ids=positions, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        on_step(step + 1, loss.item())
    model.eval()
    return time.perf_counter() - started


def _optimizers(model: GPT2LMHeadModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, with updates as large as AdamW's, and AdamW for the rest.

    After a million tokens the held-out loss is 4.27 with Muon and 4.45 with AdamW alone (docs/log.md).
    """
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and ".h." in name]
    embeddings = [p for name, p in named if p.dim() == 2 and ".h." not in name]
    vectors = [p for p in model.parameters() if p.dim() < 2]  # biases and norms are not decayed
    groups = [{"params": embeddings, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    decay = recipe.weight_decay
    return [
        torch.optim.Muon(matrices, recipe.matrix_learning_rate, decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas, fused=True),
    ]


@torch.inference_mode()
def mean_loss(model: GPT2LMHeadModel, stream: Tensor, max_windows: int = 64) -> float:
    """Nats per token over whole-context windows, side by side, spread evenly over the stream when there are more."""
    context = model.config.n_positions
    starts = range(0, len(stream) - context, context)
    chosen = starts[:: max(1, len(starts) // max_windows)]
    losses = [
        cross_entropy(model(stream[None, s : s + context]).logits[0], stream[s + 1 : s + context + 1]) for s in chosen
    ]
    return torch.stack(losses).mean().item()
