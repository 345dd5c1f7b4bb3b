"""Trains the embedded model on a clean checkout and the standard library, measures it and writes its files.

`python tools/train_demo_model.py` does all of it. The package's code is read as text.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import tokenizers
import torch
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from demo_model import checkpoint
from demo_model.card import Facts, Provenance, render
from demo_model.corpus import fingerprint, gather
from demo_model.network import Gpt2, Shape
from demo_model.training import Recipe, mean_loss, train
from demo_model.vocabulary import END_ID, MARKERS, Streams, streams, write_tokenizer

ROOT = Path(__file__).resolve().parent.parent
RECIPE = Recipe(steps=2200)
SHAPE = Shape()
_REPORT_EVERY_S = 15.0
_TIMED_STEPS = 12  # an eighth of them whole-context windows, as in the run itself
_SAMPLE_TOKENS = 60
_PROMPTS = (
    "The scheduler",
    "Every millisecond between a request's first byte and its last",
    "Return a list of",
    'def read_json(path):\n    """',
)
_QUESTIONS = ("Hello", "What is roseinfer?", "What does os.path.join do?")


def main() -> int:
    """Train and write, with progress on the console. The exit code is 2 when this is not a whole checkout."""
    options = _parse_arguments()
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    try:
        documents = gather(ROOT)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    corpus = streams(documents, SHAPE.vocab_size, options.seed)
    recipe = _recipe(options, corpus.train)
    model = _new_model(recipe)
    console.print(
        f"{len(documents):,} documents, {len(corpus.train):,} tokens to train on, {model.num_parameters:,} parameters, "
        f"{recipe.steps:,} steps of {recipe.tokens_per_step:,} tokens"
    )
    seconds = _train_with_progress(model, corpus.train, recipe, console)
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint.write(model, options.out, END_ID)
    write_tokenizer(corpus.tokenizer, options.out, SHAPE.context)
    provenance = Provenance(
        fingerprint=fingerprint(documents),
        command=f"python tools/train_demo_model.py --steps {recipe.steps} --seed {recipe.seed}",
        versions=f"Python {platform.python_version()}, torch {torch.__version__}, tokenizers {tokenizers.__version__}, "
        f"{options.threads} threads",
        seconds=seconds,
    )
    facts = _measure(corpus, options.out)
    (options.out / "README.md").write_text(render(documents, SHAPE, recipe, provenance, facts), encoding="utf-8")
    for text, loss in facts.losses.items():
        console.print(f"loss, {text}: {loss:.3f}")
    for prompt, continuation in facts.samples:
        console.print(f"{prompt}⏵{continuation}\n", markup=False)
    console.print(f"wrote {options.out} in {seconds / 60:.1f} minutes of training")
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the embedded model from this checkout.")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=RECIPE.steps, help="steps of training (default: %(default)s)")
    length.add_argument("--minutes", type=float, help="as many steps as fit; the card says how many those were")
    parser.add_argument("--seed", type=int, default=RECIPE.seed, help="of weights and windows (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch; other sums round otherwise (default: 2)")
    parser.add_argument("--out", type=Path, default=ROOT / "src" / "roseinfer" / "demo", help="the folder to write")
    return parser.parse_args()


def _recipe(options: argparse.Namespace, train_stream: torch.Tensor) -> Recipe:
    recipe = replace(RECIPE, seed=options.seed, steps=options.steps)
    if options.minutes is None:
        return recipe
    trial = replace(recipe, steps=_TIMED_STEPS)
    train(_new_model(trial), train_stream, replace(trial, steps=2), lambda *_: None)  # allocators and caches warm
    seconds = train(_new_model(trial), train_stream, trial, lambda *_: None)
    return replace(recipe, steps=max(1, int(options.minutes * 60 * _TIMED_STEPS / seconds)))


def _new_model(recipe: Recipe) -> Gpt2:
    torch.manual_seed(recipe.seed)
    return Gpt2(SHAPE, recipe.dropout)


def _train_with_progress(model: Gpt2, train_stream: torch.Tensor, recipe: Recipe, console: Console) -> float:
    """Train with a progress bar on a terminal, a line now and then elsewhere. Returns seconds."""
    if not console.is_terminal:
        return train(model, train_stream, recipe, _plain_lines(recipe.steps))
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=recipe.steps)
        return train(
            model,
            train_stream,
            recipe,
            lambda step, loss: progress.update(task, completed=step, description=f"loss {loss:.3f}"),
        )


def _plain_lines(num_steps: int) -> Callable[[int, float], None]:
    started = reported = time.perf_counter()

    def report(step: int, loss: float) -> None:
        nonlocal reported
        now = time.perf_counter()
        if now - reported >= _REPORT_EVERY_S or step == num_steps:
            reported = now
            left = (now - started) / step * (num_steps - step)
            print(f"step {step}/{num_steps}  loss {loss:.3f}  {left / 60:.1f} min left", flush=True)

    return report


def _measure(corpus: Streams, folder: Path) -> Facts:
    """Measure losses and samples of the files just written, in bfloat16, rather than of the run's float32."""
    model = checkpoint.read(folder, SHAPE)
    return Facts(
        num_parameters=model.num_parameters,
        num_train_tokens=len(corpus.train),
        num_held_out_tokens=len(corpus.held_out),
        bytes_per_token=corpus.held_out_bytes_per_token,
        losses={"trained on": mean_loss(model, corpus.train), "held out": mean_loss(model, corpus.held_out)},
        samples=_samples(model, corpus.tokenizer),
        files={path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix != ".md"},
    )


def _samples(model: Gpt2, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    def continued(prompt: str) -> str:
        ids = model.continue_greedily(tokenizer.encode(prompt).ids, _SAMPLE_TOKENS, END_ID)
        return tokenizer.decode(ids, skip_special_tokens=False)

    prompts = [*_PROMPTS, *(f"{MARKERS['user']}{question}{MARKERS['assistant']}" for question in _QUESTIONS)]
    return [(prompt, continued(prompt)) for prompt in prompts]


if __name__ == "__main__":
    sys.exit(main())
