"""Asks EleutherAI's lm-evaluation-harness to score texts on a server: URL, tokenizer and requests in, scores out.

A process of its own, so that what the harness does to a process does not happen to the tests. Reads one JSON object
from stdin and writes one to stdout: `loglikelihood` of (context, continuation), `rolling` of texts, `until` of prompts.
"""

import importlib
import json
import sys
from typing import Any


def main() -> None:
    asked: dict[str, Any] = json.load(sys.stdin)
    # By name, since it is installed without what the rest of it needs and so is no requirement of ours: see Makefile.
    model_type: Any = importlib.import_module("lm_eval.models.openai_completions").LocalCompletionsAPI
    instance: Any = importlib.import_module("lm_eval.api.instance").Instance
    model = model_type(
        base_url=f"{asked['url']}/v1/completions",
        model=asked["model"],
        tokenizer=asked["tokenizer"],
        tokenizer_backend="huggingface",
        batch_size=asked["batch_size"],
        max_length=asked["max_length"],
    )

    def requests(kind: str, arguments: list[Any]) -> list[Any]:
        return [instance(kind, {}, tuple(each), index) for index, each in enumerate(arguments)]

    told = {
        "loglikelihood": model.loglikelihood(requests("loglikelihood", asked["loglikelihood"])),
        "rolling": model.loglikelihood_rolling(requests("loglikelihood_rolling", asked["rolling"])),
        "until": model.generate_until(requests("generate_until", asked["until"])),
    }
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
