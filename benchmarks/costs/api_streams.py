"""Measures what the front end computes for each token of a stream, by API and by kind of answer, in microseconds.

    python -m benchmarks.costs.api_streams [--tokens 2000] [--rounds 15]

From the engine's output to the bytes of the event: the token's text, its parts, the frame. The engine's messages, the
network and the client are left out; they are the same for all. The APIs take turns, a stream each round; medians over
the rounds, and the size of an event.
"""

import argparse
import asyncio
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import roseinfer
from benchmarks.tables import print_head, print_row
from roseinfer.errors import PromptName
from roseinfer.messages import Request, SamplingDefaults, SamplingParams, TokenOutput
from roseinfer.records import RequestTimeline
from roseinfer.server.anthropic.events import MessageDialect
from roseinfer.server.api.respond import Dialect, Head
from roseinfer.server.openai.chat import ChatDialect, PartsDialect
from roseinfer.server.openai.responses import ResponseDialect
from roseinfer.server.openai.responses_schema import ReasoningOptions, ResponseBody
from roseinfer.server.openai.schema import StreamOptions
from roseinfer.text.answers import reasoning, tool_formats
from roseinfer.text.answers.answer import AnswerParser
from roseinfer.text.answers.functions import Function
from roseinfer.text.answers.reasoning import Reasoning
from roseinfer.text.answers.tool_use import ToolUse
from roseinfer.text.choice import EncodedPrompt
from roseinfer.text.generation import Generation, GenerationRequest
from roseinfer.text.tokenizer.tokenizer import Tokenizer

TEXT = "The scheduler takes a batch of sequences and gives each of them one token. "
THOUGHTS = Reasoning(reasoning.FORMATS["think"], is_open=True)
TOOLS = ToolUse([Function("f")], is_forced=False, is_parallel=True, tool_format=tool_formats.FORMATS["hermes"])
BODY = ResponseBody(input="Hi", stream=True)
SUMMED = ResponseBody(input="Hi", stream=True, reasoning=ReasoningOptions(summary="auto"))

Make = Callable[[AnswerParser | None], Dialect]


def _chat(parser: AnswerParser | None) -> Dialect:
    options = StreamOptions()
    return ChatDialect(options) if parser is None else PartsDialect([parser], options, has_reasoning=True)


APIS: Mapping[str, Make] = {
    "chat": _chat,
    "responses": lambda parser: ResponseDialect(BODY, parser, SamplingDefaults()),
    "responses with a summary": lambda parser: ResponseDialect(SUMMED, parser, SamplingDefaults()),
    "messages": lambda parser: MessageDialect(1 << 20, parser, "id"),
}
ANSWERS: Mapping[str, tuple[Reasoning | None, ToolUse | None]] = {
    "text": (None, None),
    "text where tools may be called": (None, TOOLS),
    "thoughts": (THOUGHTS, None),
}


class NoEngine:
    """A client of no engine: its outputs are made beforehand."""

    def generate(self, *_: object) -> None: ...


async def measure(make: Make, tokenizer: Tokenizer, token_ids: list[int], answer: str) -> tuple[float, float]:
    """Microseconds and bytes of a token."""
    thoughts, tools = ANSWERS[answer]
    prompt = EncodedPrompt([1], PromptName("input"), reasoning=thoughts)
    wanted = GenerationRequest(prompts=[prompt], params=SamplingParams(max_tokens=1), stream_interval=1)
    request = Request(request_id="a", prompt_token_ids=[1], params=wanted.params)
    timeline = RequestTimeline(request_id="a", recv_ns=0)
    client: Any = NoEngine()
    generation = Generation(wanted, [request], [timeline], client, tokenizer)
    dialect = make(AnswerParser(thoughts, tools) if thoughts or tools else None)
    dialect.begin(Head("id", 0, "model"), generation)
    outputs = [TokenOutput("a", [token_id]) for token_id in token_ids]
    num_bytes = len(dialect.first_frames())
    start = time.perf_counter_ns()
    for output in outputs:
        for delta in generation.pop_deltas([output]):
            num_bytes += len(await dialect.frames(delta))
    elapsed_ns = time.perf_counter_ns() - start
    return elapsed_ns / 1e3 / len(outputs), num_bytes / len(outputs)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000, help="of a stream")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.load(Path(roseinfer.__file__).parent / "demo")
    token_ids = (tokenizer.encode_here(TEXT, add_special_tokens=False) * arguments.tokens)[: arguments.tokens]
    print(f"Python {platform.python_version()}, {arguments.tokens} tokens, {arguments.rounds} rounds")
    print_head("answer", "API", "µs a token", "of a chat's", "bytes a token")
    for answer in ANSWERS:
        rounds = [
            {name: await measure(make, tokenizer, token_ids, answer) for name, make in APIS.items()}
            for _ in range(arguments.rounds)
        ]
        medians = {name: statistics.median(each[name][0] for each in rounds) for name in APIS}
        for name, median in medians.items():
            print_row(answer, name, median, f"{median / medians['chat']:.2f}", rounds[0][name][1])
    tokenizer.close()


if __name__ == "__main__":
    asyncio.run(main())
