"""Runs planned requests through `LLM` (engine, link and detokeniser, without HTTP) for a benchmark that calls it.

    python -m benchmarks.peers.engine_only MODEL_DIR --precision bfloat16 [--option PATH=VALUE …]

It is what a served rate is compared with. The stamps are the engine's: one for each token, when it was known on the
host. `drive` submits on a schedule; `drive_offline` hands all prompts over as one batch.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_options import PRECISIONS, config_of, parse, precision_options
from benchmarks.protocol import answer


class EngineOnly:
    """An `LLM` that is ready."""

    def __init__(self, model: Path, options: dict[str, str]) -> None:
        from roseinfer import LLM

        self._llm = LLM(config=config_of(model, options))

    def describe(self) -> dict[str, Any]:
        import msgspec

        return dict(msgspec.to_builtins(self._llm.info))

    def drive(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run the requests of a workload on their schedule. Returns one answer for each, in seconds."""
        start = time.monotonic()
        submitted = []
        for request in requests:
            if (wait := start + request["at"] - time.monotonic()) > 0:
                time.sleep(wait)
            params = self._params(request["new_tokens"])
            submitted.append((time.monotonic(), self._llm.submit(request["token_ids"], params)))
        return [_answer(moment, self._llm.result(request_id).timeline.token_ns) for moment, request_id in submitted]

    def drive_offline(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run them as one batch, due at once, with as many new tokens as the first one wants."""
        start = time.monotonic()
        prompts = [request["token_ids"] for request in requests]
        completions = self._llm.generate(prompts, self._params(requests[0]["new_tokens"]))
        return [_answer(start, completion.timeline.token_ns) for completion in completions]

    @staticmethod
    def _params(new_tokens: int) -> Any:
        from roseinfer.messages import SamplingParams

        return SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)


def _answer(submitted: float, stamps: Sequence[int]) -> dict[str, Any]:
    return {"submitted": submitted, "pieces": [stamp / 1e9 for stamp in stamps], "num_tokens": len(stamps)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--option", action="append", default=[], metavar="PATH=VALUE", help="of the config tree")
    arguments = parser.parse_args()
    subject = EngineOnly(arguments.model, {**precision_options(arguments.precision), **parse(arguments.option)})
    answer({name: getattr(subject, name) for name in ("describe", "drive", "drive_offline")})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
