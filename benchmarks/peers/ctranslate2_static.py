"""Runs planned requests through CTranslate2 on a CPU: static batches, stamps taken in its step callback.

    python -m benchmarks.peers.ctranslate2_static MODEL_DIR CONVERTED_DIR --precision float32

Needs the environment of peers. The model is converted once, into CONVERTED_DIR. A precision that the processor has no
kernels for is refused: the library would silently take another one.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from benchmarks.peers.static_batches import Emit, drive
from benchmarks.protocol import answer


class CTranslate2Static:
    """A generator that is ready."""

    def __init__(self, model: str, converted: Path, precision: str) -> None:
        import ctranslate2  # type: ignore[import-not-found]  # the peers' environment has it
        from transformers import AutoTokenizer

        if precision not in ctranslate2.get_supported_compute_types("cpu"):
            raise SystemExit(f"CTranslate2 has no {precision} on this processor")
        if not (converted / "model.bin").is_file():
            ctranslate2.converters.TransformersConverter(model).convert(str(converted), force=True)
        self._tokens_of = AutoTokenizer.from_pretrained(model).convert_ids_to_tokens
        self._generator: Any = ctranslate2.Generator(
            str(converted),
            device="cpu",
            compute_type=precision,
            intra_threads=len(os.sched_getaffinity(0)),
            inter_threads=1,
        )
        self._version = f"ctranslate2 {ctranslate2.__version__}"

    def describe(self) -> str:
        return self._version

    def run_batch(self, prompts: list[list[int]], new_tokens: int, emit: Emit) -> None:
        """See RunBatch."""

        def step(result: Any) -> bool:
            emit(result.batch_id)
            return False

        self._generator.generate_batch(
            [self._tokens_of(prompt) for prompt in prompts],
            max_length=new_tokens,
            min_length=new_tokens,
            sampling_topk=1,
            beam_size=1,
            include_prompt_in_result=False,
            cache_static_prompt=False,
            callback=step,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("converted", type=Path)
    parser.add_argument("--precision", choices=("float32", "bfloat16", "int8"), default="float32")
    arguments = parser.parse_args()
    peer = CTranslate2Static(arguments.model, arguments.converted, arguments.precision)
    answer({"describe": peer.describe, "drive": lambda requests: drive(peer.run_batch, requests)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
