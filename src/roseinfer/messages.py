"""What crosses the seam between front end and engine: frozen messages of integers, floats and short strings.

Front end to engine: a `Command`. Engine to front end: an `Event`, at most one `StepOutput` for each step.
Nothing here knows text, tensors or HTTP; the process transport writes these structs as msgpack, never as pickle.
"""

import msgspec

from roseinfer.records import EngineTimes, FinishReason, LifecycleState, StepRecord


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How the next token is chosen and when to stop. Validated at the edge; the engine trusts it.

    The order is the field's usual one: temperature, then top-k, then top-p, then min-p; what is left is renormalised.
    """

    temperature: float = 1.0  # 0 means greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of likeliest tokens whose mass reaches top_p
    min_p: float = 0.0  # drop tokens less likely than min_p times the likeliest
    max_tokens: int = 16
    min_tokens: int = 0  # until then neither eos nor a stop token can be sampled
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0  # in [0, 2**63); with the position it determines the random number of each token
    num_logprobs: int | None = None  # None: none; k: the sampled token's and the k likeliest tokens'

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """What was asked: one prompt to continue. What becomes of it is the engine's `Sequence`."""

    request_id: str
    prompt_token_ids: list[int]  # at least one, each in [0, vocab_size)
    params: SamplingParams
    cache_salt: str = ""  # requests share cached prefixes only with requests of the same salt


class Abort(msgspec.Struct, frozen=True, tag=True, gc=False):
    """End this request now, wherever it is. Unknown and finished ids are ignored."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Leave the loop; whatever is still running is dropped."""


Command = Request | Abort | Shutdown


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position, of the model's own distribution (before temperature and truncation)."""

    logprob: float  # of the sampled token
    rank: int  # of the sampled token, 1 for the likeliest
    top_token_ids: list[int]
    top_logprobs: list[float]


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step did for one request. `finish_reason` is set exactly once, on the last output of a request."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token id, when asked for
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the eos or stop token that ended it; it is the last of token_ids
    times: EngineTimes | None = None  # only on the last output


class StepOutput(msgspec.Struct, frozen=True, tag=True, gc=False):
    """All that one step has to tell: tokens and finishes together, and the record of the step itself."""

    outputs: list[TokenOutput]
    record: StepRecord


class StartupProgress(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The engine entered a stage of its start-up; `detail` is one short phrase for a person."""

    state: LifecycleState
    stage: str
    detail: str = ""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """The engine is ready, and this is what it turned out to be once every `auto` was resolved."""

    checkpoint_dir: str  # where weights and tokenizer files lie, on this host
    model_type: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    device: str
    dtype: str
    attention: str
    linear: str  # how matrices are multiplied: `onednn` (packed, exact whatever the batch) or `torch`
    num_threads: int  # of the model on a CPU; 0 elsewhere
    block_size: int
    num_blocks: int
    startup_s: dict[str, float]  # stage name -> seconds; the stages add up to the engine's time to ready


class EngineFailure(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The engine cannot go on; with `is_config_error`, because of a value the user gave, `param` if it has a name."""

    message: str
    traceback: str = ""
    is_config_error: bool = False
    param: str | None = None


Event = StartupProgress | EngineInfo | StepOutput | EngineFailure
