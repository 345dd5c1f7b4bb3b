"""Runs planned requests, or decode steps, through the engine without HTTP for a benchmark that calls it.

    python -m benchmarks.peers.engine_only MODEL_DIR --precision bfloat16 [--option PATH=VALUE …]
    python -m benchmarks.peers.engine_only MODEL_DIR --precision bfloat16 --steps [--batch 64] [--context 512]

Requests go through `LLM` (engine, link and detokeniser), which is what a served rate is compared with. Their stamps are
the engine's: one for each token, when it was known on the host. `drive` submits on a schedule; `drive_offline` hands
all prompts over as one batch. With `--steps` the engine runs in this process: `prepare` brings sequences to a
context, `run` makes decode steps and returns the seconds of each, `release` lets the sequences go.
"""

import argparse
import gc
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.engine_options import PRECISIONS, config_of, parse, precision_options
from benchmarks.protocol import answer, answered
from benchmarks.random_gpt2 import NUM_POSITIONS

PREFILL_TOKENS = 8192  # in one step, so that all sequences begin to decode within a few steps of each other
NUM_SPARE_TOKENS = 32
Measured = dict[str, list[float]]  # "step" and, of an engine, its phases: seconds of each step


class EngineOnly:
    """An `LLM` that is ready."""

    def __init__(self, model: Path, options: dict[str, str]) -> None:
        from roseinfer import LLM

        self._llm = LLM(config=config_of(model, options))

    def describe(self) -> dict[str, Any]:
        import msgspec

        return dict(msgspec.to_builtins(self._llm.info))

    def drive(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run the requests of a workload on their schedule. Returns one answer for each."""
        start = time.monotonic()
        submitted = []
        for request in requests:
            if (wait := start + request["at"] - time.monotonic()) > 0:
                time.sleep(wait)
            params = self._params(request["new_tokens"])
            submitted.append((time.monotonic_ns(), self._llm.submit(request["token_ids"], params)))
        return [answered(moment, self._llm.result(request_id).timeline.token_ns) for moment, request_id in submitted]

    def drive_offline(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run them as one batch, due at once, with as many new tokens as the first one wants."""
        start_ns = time.monotonic_ns()
        prompts = [request["token_ids"] for request in requests]
        completions = self._llm.generate(prompts, self._params(requests[0]["new_tokens"]))
        return [answered(start_ns, completion.timeline.token_ns) for completion in completions]

    @staticmethod
    def _params(new_tokens: int) -> Any:
        from roseinfer.messages import SamplingParams

        return SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)


class EngineSteps:
    """`Engine.step` as the server runs it: scheduler, model, sampling, commit; greedy, EOS ignored."""

    def __init__(self, model: Path, options: dict[str, str], batch: int, context: int) -> None:
        from roseinfer.wiring import build_engine

        needed_tokens = batch * (context + 128)
        defaults = {
            "scheduler.max_num_seqs": str(batch),
            "scheduler.max_num_batched_tokens": str(PREFILL_TOKENS),
            "scheduler.max_prefill_tokens": str(PREFILL_TOKENS),  # streams wait: the first must not end before the last
            "scheduler.speculation": "off",  # a token for each sequence
            "cache.prefix_caching": "false",  # every sequence must have keys of its own to read
            "cache.num_blocks": str(max(needed_tokens, NUM_POSITIONS) // 16 + batch),
        }
        self._engine = build_engine(config_of(model, {**defaults, **options}), lambda _: None)
        gc.freeze()  # as the engine's loop does when it begins
        self._generator = random.Random(0)
        self._names: list[str] = []

    def describe(self) -> dict[str, Any]:
        import msgspec

        return dict(msgspec.to_builtins(self._engine.info))

    def prepare(self, batch: int, context: int, num_steps: int) -> None:
        """Start `batch` sequences that have `context` tokens each, and room for `num_steps` more."""
        from roseinfer.messages import Request, SamplingParams

        # One token of the context is sampled by the prefill, and the first sequences decode while the last are read.
        params = SamplingParams(temperature=0.0, max_tokens=num_steps + NUM_SPARE_TOKENS, ignore_eos=True)
        self._names = [f"{batch} {context} {i}" for i in range(batch)]
        for name in self._names:
            prompt = self._generator.choices(range(self._engine.info.vocab_size), k=context - 1)
            self._engine.add_request(Request(request_id=name, prompt_token_ids=prompt, params=params))
        while self._engine.step().record.num_decode_seqs < batch:
            assert self._engine.has_work, "the first sequences ended before the last decoded"

    def run(self, num_steps: int) -> Measured:
        """Make a number of decode steps, one token for each sequence in each."""
        durations: Measured = {"step": [], "schedule": [], "launch": [], "wait": [], "commit": []}
        for _ in range(num_steps):
            began = time.perf_counter()
            record = self._engine.step().record
            durations["step"].append(time.perf_counter() - began)
            assert record.num_decode_seqs == len(self._names), "not a decode step of all sequences"
            for name in ("schedule", "launch", "wait", "commit"):
                durations[name].append(getattr(record.phases, name) / 1e9)
        return durations

    def release(self) -> None:
        """Let the sequences go."""
        for name in self._names:
            self._engine.abort(name)
        while self._engine.has_work:
            self._engine.step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--option", action="append", default=[], metavar="PATH=VALUE", help="of the config tree")
    parser.add_argument("--steps", action="store_true", help="decode steps in place of requests")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="of --steps: the largest")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="of --steps: the longest")
    arguments = parser.parse_args()
    options = {**precision_options(arguments.precision), **parse(arguments.option)}
    if arguments.steps:
        steps = EngineSteps(arguments.model, options, arguments.batch, arguments.context)
        answer({name: getattr(steps, name) for name in ("describe", "prepare", "run", "release")})
    else:
        subject = EngineOnly(arguments.model, options)
        answer({name: getattr(subject, name) for name in ("describe", "drive", "drive_offline")})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
