"""Trains the embedded model on a clean checkout and the standard library, measures it and writes its files.

`python tools/train_demo_model.py` does all of it. The package's code is read as text.
"""

import argparse
import hashlib
import math
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import tokenizers
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from demo_model.corpus import Document, fingerprint, gather
from demo_model.training import Recipe, mean_loss, train
from demo_model.vocabulary import END, END_ID, MARKERS, Streams, streams, write_tokenizer
from roseinfer.cli.progress import Progress

ROOT = Path(__file__).resolve().parent.parent
RECIPE = Recipe(steps=2200)
CONFIG = GPT2Config(
    vocab_size=2048,
    n_positions=1024,
    n_embd=192,
    n_layer=4,
    n_head=3,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), END_ID),
)
_CARD = Path(__file__).with_name("demo_model") / "card.md"  # prose, with the places of the numbers in braces
_TIMED_STEPS = 12  # an eighth of them whole-context windows, as in the run itself
_SAMPLE_TOKENS = 60
_PROMPTS = (
    "The scheduler",
    "Every millisecond between a request's first byte and its last",
    "Return a list of",
    'def read_json(path):\n    """',
    *(f"{MARKERS['user']}{question}{MARKERS['assistant']}" for question in ("Hello", "What is roseinfer?")),
    f"{MARKERS['user']}What does os.path.join do?{MARKERS['assistant']}",
)


def main() -> int:
    """Train and write, with progress on the console. The exit code is 2 when this is not a whole checkout."""
    options = _parse_arguments()
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    try:
        documents = gather(ROOT)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    corpus = streams(documents, CONFIG.vocab_size, options.seed)
    recipe = _recipe(options, corpus.train)
    model = _new_model(recipe)
    print(
        f"{len(documents):,} documents, {len(corpus.train):,} tokens to train on, {model.num_parameters():,} "
        f"parameters, {recipe.steps:,} steps of {recipe.tokens_per_step:,} tokens"
    )
    with Progress("training", total=recipe.steps) as progress:
        seconds = train(model, corpus.train, recipe, lambda step, _: progress.update(done=step))
    options.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(options.out)
    (options.out / "model.safetensors").chmod(0o644)  # which safetensors writes private
    write_tokenizer(corpus.tokenizer, options.out, CONFIG.n_positions)
    card = _card(documents, corpus, recipe, options, seconds)
    (options.out / "README.md").write_text(card, encoding="utf-8")
    print(card.partition("## Loss")[2].partition("## Limits")[0])
    print(f"wrote {options.out} in {seconds / 60:.1f} minutes of training")
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


def _new_model(recipe: Recipe) -> GPT2LMHeadModel:
    torch.manual_seed(recipe.seed)
    return GPT2LMHeadModel(CONFIG)


def _card(
    documents: Sequence[Document], corpus: Streams, recipe: Recipe, options: argparse.Namespace, seconds: float
) -> str:
    """The card in Markdown, with losses and samples of the files just written, in bfloat16, and not of the run."""
    model = GPT2LMHeadModel.from_pretrained(options.out, dtype=torch.float32).eval()
    num_tokens = recipe.steps * recipe.tokens_per_step
    losses = {"trained on": mean_loss(model, corpus.train), "held out": mean_loss(model, corpus.held_out)}
    files = {path.name: path.read_bytes() for path in sorted(options.out.iterdir()) if path.suffix != ".md"}
    return _CARD.read_text(encoding="utf-8").format(
        config=CONFIG,
        recipe=recipe,
        corpus=corpus,
        num_parameters=model.num_parameters(),
        num_train_tokens=len(corpus.train),
        num_held_out_tokens=len(corpus.held_out),
        fingerprint=fingerprint(documents),
        command=f"python tools/train_demo_model.py --steps {recipe.steps} --seed {recipe.seed}",
        versions=f"Python {platform.python_version()}, torch {torch.__version__}, tokenizers {tokenizers.__version__}, "
        f"{options.threads} threads",
        head_width=CONFIG.n_embd // CONFIG.n_head,
        mlp_width=4 * CONFIG.n_embd,
        minutes=seconds / 60,
        tokens_per_second=num_tokens / seconds,
        epochs=num_tokens / len(corpus.train),
        data_rows="\n".join(_data_rows(documents)),
        recipe_rows="\n".join(f"| {name.replace('_', ' ')} | {value} |" for name, value in asdict(recipe).items()),
        loss_rows="\n".join(f"| {k} | {v:.3f} | {math.exp(v):.1f} |" for k, v in losses.items()),
        file_rows="\n".join(f"| `{k}` | {len(v):,} | `{hashlib.sha256(v).hexdigest()}` |" for k, v in files.items()),
        samples="\n\n".join(_sample(model, corpus.tokenizer, prompt) for prompt in _PROMPTS),
    )


def _sample(model: GPT2LMHeadModel, tokenizer: tokenizers.Tokenizer, prompt: str) -> str:
    """A greedy continuation, up to the end mark."""
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    continued = model.generate(ids, max_new_tokens=_SAMPLE_TOKENS, do_sample=False, pad_token_id=END_ID)[0]
    text = tokenizer.decode(continued[ids.shape[1] :].tolist(), skip_special_tokens=False)
    return f"````text\n{prompt}⏵{text.removesuffix(END)}\n````"


def _data_rows(documents: Sequence[Document]) -> list[str]:
    rows = []
    for source, form, copies in sorted({(d.source, d.form, d.copies) for d in documents}):
        group = [d for d in documents if (d.source, d.form) == (source, form)]
        held_out = sum(d.num_bytes for d in group if d.is_held_out)
        trained = sum(d.num_bytes for d in group) - held_out
        rows.append(f"| {source} | {form} | {len(group):,} | {trained / 1e3:,.0f} | {copies} | {held_out / 1e3:,.0f} |")
    return rows


if __name__ == "__main__":
    sys.exit(main())
