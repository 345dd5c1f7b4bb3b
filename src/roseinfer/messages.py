"""The frozen messages between front end and engine, and the check of what a request may ask for.

The front end sends a `Command`, the engine an `Event`, at most one `StepOutput` a step. The process transport writes
them as msgpack; `engine/link/frames.py` shortens requests that share parameters or a prompt.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from roseinfer.errors import ConfigError, EngineError, EngineFailed, InvalidRequest, PromptName, PromptTooLong
from roseinfer.records import EngineTimes, FinishReason, LifecycleState, StepRecord, Violation
from roseinfer.runtime.validation import Misfit, convert

LEAST_DIVISOR = 1e-5  # of logits: a quotient by less could overflow float32
GREEDY_BELOW = LEAST_DIVISOR  # of temperatures: there the likeliest token has all the mass anyway
MAX_LOGPROBS = 20
MAX_PROFILE_STEPS = 200  # no request is served while the trace is written
MAX_INT32 = 2**31 - 1
MAX_TOKENS = MAX_INT32  # to generate: of no context

# What a request may ask for, the same for a body, a flag and a caller of `LLM`.
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopK = Annotated[int, Meta(ge=0, le=MAX_INT32)]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_INT32)]
MinTokens = Annotated[int, Meta(ge=0, le=MAX_INT32)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
StopTokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=64)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=LEAST_DIVISOR, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
MOST_URGENT = -100
Priority = Annotated[int, Meta(ge=MOST_URGENT, le=100)]
_TOKEN_ID_KEYS = {"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}  # JSON has no other keys than strings
LogitBias = Annotated[dict[TokenId, Bias], Meta(max_length=300, extra_json_schema=_TOKEN_ID_KEYS)]


GrammarKind = Literal["json_schema", "regex", "choice", "calls", "lark", "text"]
Tag = Annotated[str, Meta(min_length=1, max_length=64)]


Pooling = Literal["last", "mean"]
"""Which hidden rows of a prompt make its embedding: that of its last token, or the mean of all."""


class Thought(msgspec.Struct, frozen=True, gc=False):
    """The thoughts that may come before a text, between tags: any text, which ends with the closing tag alone."""

    opening: Tag
    closing: Tag
    is_open: bool  # the prompt ends with the opening tag; else the text may begin with it
    max_tokens: MinTokens | None = None  # behind the opening tag; then the closing tag is forced


class Grammar(msgspec.Struct, frozen=True, gc=False):
    """The form that a text must have, in a language that `text/grammar/` compiles (docs/structured-output.md).

    The source of `choice` is a list of texts as JSON, that of `calls` a `CallGrammar` as JSON. The kind `text` is any
    text, for a thought of limited length before it.
    """

    kind: GrammarKind
    source: str
    thought: Thought | None = None


class ParameterShape(msgspec.Struct, frozen=True):
    """The form of one parameter where arguments are no JSON object: a value between fixed texts."""

    before: str
    schema: dict[str, Any]  # of JSON, or of a text, which stands there without quotes and does not hold what ends it
    after: str
    is_text: bool
    is_required: bool


class CallShape(msgspec.Struct, frozen=True):
    """The form of a call of one function, with fixed text before and after its arguments.

    These are JSON by the schema, or parameters in their order with a text between any two; the schema is then the one
    that references in those of the parameters go by, at least as much of it as they need.
    """

    before: str
    schema: dict[str, Any]
    after: str
    parameters: list[ParameterShape] | None = None
    between: str = ""
    name: str = ""  # of the function, for errors


class CallGrammar(msgspec.Struct, frozen=True):
    """One call, or several with a text between any two, and fixed text before and after all; or a text of a form."""

    shapes: list[CallShape]
    between: str
    most: int
    before: str = ""
    after: str = ""
    form: Grammar | None = None  # of a text that may come instead; None: calls are forced


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How the next token is chosen and when to stop. `check_request` validates it at the edge; the engine trusts it.

    The order is the usual one: biases, penalties, temperature, top-k, top-p, min-p; what is left is renormalised.
    """

    temperature: Temperature = 1.0  # below GREEDY_BELOW: the likeliest token
    top_k: TopK = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: TopP = 1.0  # keep the smallest set of likeliest tokens whose mass reaches top_p
    min_p: MinP = 0.0  # drop tokens less likely than min_p times the likeliest
    max_tokens: TokenCount = 16
    min_tokens: MinTokens = 0  # until then neither eos nor a stop token can be sampled; no more than max_tokens
    stop_token_ids: StopTokenIds = ()
    ignore_eos: bool = False
    seed: Seed | None = None  # with the position it determines each random number; None: front doors draw one
    num_logprobs: NumLogprobs | None = None  # None: none; k: the sampled token's and the k likeliest tokens'
    presence_penalty: Penalty = 0.0  # taken from the logit of every token that was generated
    frequency_penalty: Penalty = 0.0  # and this as often as it was
    repetition_penalty: RepetitionPenalty = 1.0  # of tokens of prompt and completion: see model/sampling/logit_edits.py
    logit_bias: LogitBias = {}  # added to the logits of these tokens
    num_prompt_logprobs: NumLogprobs | None = None  # as `num_logprobs`, of the tokens of the prompt but the first
    grammar: Grammar | None = None  # what the text must be; it ends where the grammar does
    pooling: Pooling | None = None  # the answer is the prompt's embedding, and no token; needs max_tokens 1, ignore_eos

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether some penalty depends on the tokens that came before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def edits_logits(self) -> bool:
        """Whether tokens are drawn from logits other than the model's."""
        return self.has_penalties or bool(self.logit_bias)


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What requests get that leave these out: the checkpoint's values, else those that change nothing."""

    temperature: Temperature = 1.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0


# What each level of `priority` is worth of waiting under the admission policy of that name: the whole range of 200
# levels delays a request by little more than three minutes.
PRIORITY_WAIT_S = 1.0


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """One prompt to continue. Its state in the engine is a `Sequence`."""

    request_id: str
    prompt_token_ids: list[int]  # at least one, each in [0, vocab_size)
    params: SamplingParams
    cache_salt: str = ""  # requests share cached prefixes only with requests of the same salt
    deadline_ns: int | None = None  # of the monotonic clock: it ends then, with what it has generated
    queue_deadline_ns: int | None = None  # it ends then if it has not been in a batch yet
    priority: int = 0  # lower goes sooner, under the admission policy `priority`
    client_salt: str = ""  # the part of the salt that stood in the request, where routers see it too


class Abort(msgspec.Struct, frozen=True, tag=True, gc=False):
    """End this request now, in whatever stage. Unknown and finished ids are ignored."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True, gc=False):
    """End the loop; running requests are dropped."""


class Profile(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Profile the next steps, and write the trace into `directory`, which is made if it does not exist."""

    num_steps: int
    directory: str


Command = Request | Abort | Shutdown | Profile


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position, of the model's own distribution (before temperature and truncation)."""

    logprob: float  # of the sampled token
    rank: int  # of the sampled token, 1 for the likeliest
    top_token_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of all tokens of a prompt but the first, in columns with an entry for each of them.

    Columns because there may be as many as the context is long: bytes in the order of this host.
    """

    num_likeliest: int
    logprobs: bytes  # float64 [tokens]
    top_token_ids: bytes  # int32 [tokens, num_likeliest], likeliest first
    top_logprobs: bytes  # float64 [tokens, num_likeliest]

    def entries(self) -> Iterator[tuple[float, list[int], list[float]]]:
        """Yield each token's log-probability, and ids and log-probabilities of the likeliest in its place."""
        count = self.num_likeliest
        top_ids, top_logprobs = memoryview(self.top_token_ids).cast("i"), memoryview(self.top_logprobs).cast("d")
        for index, logprob in enumerate(memoryview(self.logprobs).cast("d")):
            here = slice(index * count, (index + 1) * count)
            yield logprob, list(top_ids[here]), list(top_logprobs[here])


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New output of one request. `finish_reason` is set exactly once, on the last output of a request."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token id, when asked for
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the eos or stop token that ended it; it is the last of token_ids
    times: EngineTimes | None = None  # on the first output after a prefill, and on the last
    slot: int | None = None  # on the first output after a prefill: stands for the request in `StepOutput.tokens`
    prompt_logprobs: PromptLogprobs | None = None  # on the first output, when asked for
    embedding: bytes | None = None  # float32 [width] in the order of this host, where `pooling` asked for it
    grammar_error: str = ""  # on the last with the reason error, where the grammar failed: for the log
    is_own_fault: bool = False  # on the last with the reason error, where the request's parameters caused it


class StepOutput(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """All outputs of one step, and the record of the step.

    A sequence that got its next token and nothing else, as nearly all do in nearly all steps, is one entry of the
    columns `slots` and `token_ids` (int32 in the byte order of this host, which no message leaves). The others are in
    `outputs`. No request is in both.
    """

    slots: bytes  # of the sequences: each is the one whose `TokenOutput.slot` named it last
    token_ids: bytes  # the token that each of them got
    outputs: list[TokenOutput]
    record: StepRecord
    started: list[str] = []  # requests that are in a batch for the first time

    def tokens(self) -> Iterator[tuple[int, int]]:
        """Slot and token id of each sequence in the columns."""
        return zip(memoryview(self.slots).cast("i"), memoryview(self.token_ids).cast("i"), strict=True)


class StartupProgress(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The engine entered a stage of its start-up; `detail` is one short phrase for a person."""

    state: LifecycleState
    stage: str
    detail: str = ""
    checkpoint_dir: str = ""  # where the checkpoint lies; empty in the stages before that is known, and in later ones


class EmbeddingInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the checkpoint wants texts embedded; `unserved` names what it wants and cannot have."""

    size: int = 0
    pooling: Pooling = "last"
    is_normalized: bool = True
    unserved: str = ""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """The engine is ready; every `auto` is resolved. A simulated engine, which has no model, has the defaults."""

    checkpoint_dir: str = ""  # where weights and tokenizer files lie, on this host
    model_type: str = "none"
    num_parameters: int = 0
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int] = []
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    embedding: EmbeddingInfo = EmbeddingInfo()
    device: str
    dtype: str = "none"
    kv_dtype: str = "none"  # of keys and values in the cache
    quantization: str = "none"  # of the weights in memory
    checkpoint_quantization: str = "none"  # the format that the weights were dequantised from
    kernels: str = ""  # level of the compiled CPU kernels; empty without them
    attention: str = "none"
    # How matrices are multiplied: `amx`, `registers`, `int8`, `int4`, `onednn` (all exact), `torch`.
    linear: str = "none"
    num_threads: int = 0  # of the model on a CPU; 0 elsewhere
    cpu_limit: float | None = None  # cores that the quota of its control groups allows; None without one
    pid: int = 0  # of the engine's process; 0 where nothing computes
    block_size: int
    num_blocks: int
    decode_graph_sizes: list[int] = []  # rows of the CUDA graphs that decode steps run in; empty without graphs
    prompt_graph_sizes: list[tuple[int, int]] = []  # tokens and rows of those that steps with prompts run in
    graph_bytes: int = 0  # of the GPU's memory that the graphs took before the engine was ready
    max_graph_bytes: int = 0  # that they may take; 0 before the first capture
    startup_s: dict[str, float] = {}  # stage name -> seconds; the stages add up to the engine's time to ready


class EngineFailure(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The engine cannot go on; with `is_config_error` because of a value the user gave, `param` if it has a name."""

    message: str
    traceback: str = ""
    is_config_error: bool = False
    param: str | None = None

    def as_error(self) -> EngineError | ConfigError:
        """The error for clients, with the engine's own message as a note for the log."""
        if self.is_config_error:
            return ConfigError(self.message, param=self.param)
        error = EngineFailed("The engine failed.")
        error.add_note(f"{self.message}\n{self.traceback}".rstrip())
        return error


class ProfileEnded(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The answer to `Profile`: how many steps were recorded, and why there is no trace, if there is none."""

    num_steps: int
    error: str = ""


BeginProfile = Callable[[int, str], Awaitable[Awaitable[ProfileEnded]]]
"""Begins to profile a number of steps into a directory, and gives what to wait for. Raises RoseinferError."""


class IdleReport(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The engine has been idle for a while and has checked its invariants; sent once each time it is idle."""

    num_added: int  # requests that came since its start
    violations: list[Violation]


Event = StartupProgress | EngineInfo | StepOutput | EngineFailure | ProfileEnded | IdleReport


def check_request(
    params: SamplingParams, prompt_token_ids: Sequence[int], info: EngineInfo, name: PromptName, limit_name: str
) -> None:
    """Check that the engine can run a request, for the server and for `LLM`.

    Raises InvalidRequest that names the field, the prompt being called `name`, or PromptTooLong, which names
    `limit_name` where the prompt alone would leave room for a token.
    """
    check_value(msgspec.structs.asdict(params), SamplingParams)
    if not prompt_token_ids:
        raise InvalidRequest(f"`{name.param}` is empty.", param=name.param)
    if name.is_text and max(prompt_token_ids) >= info.vocab_size:
        raise InvalidRequest(
            f"{name}: the tokenizer has the token {max(prompt_token_ids)} for what is in it, and the model knows "
            f"{info.vocab_size}. The files of this checkpoint do not belong together.",
            param=name.param,
        )
    known = list[Annotated[int, Meta(ge=0, lt=info.vocab_size)]]
    for where, token_ids in ((name.param, prompt_token_ids), ("stop_token_ids", params.stop_token_ids)):
        check_value(token_ids, known, where, f"; the vocabulary has {info.vocab_size} tokens")
    if params.logit_bias and max(params.logit_bias) >= info.vocab_size:
        raise InvalidRequest(
            f"`logit_bias`: {max(params.logit_bias)} is no token id; the vocabulary has {info.vocab_size} tokens.",
            param="logit_bias",
        )
    if params.pooling is not None and params.max_tokens != 1:
        raise InvalidRequest("`pooling` needs `max_tokens` 1: the prompt is all that there is.", param="max_tokens")
    if params.pooling is not None and len(prompt_token_ids) >= info.max_model_len:
        raise PromptTooLong(
            f"This model embeds up to {info.max_model_len - 1} tokens; {name} has {len(prompt_token_ids)}.",
            param=name.param,
            num_tokens=len(prompt_token_ids),
            max_model_len=info.max_model_len,
        )
    if len(prompt_token_ids) + params.max_tokens > info.max_model_len:
        raise PromptTooLong(
            f"{PromptTooLong.limit(info.max_model_len)}; the {len(prompt_token_ids)} of {name} "
            f"and the {params.max_tokens} to be generated do not fit.",
            param=limit_name if len(prompt_token_ids) < info.max_model_len else name.param,
            num_tokens=len(prompt_token_ids),
            max_model_len=info.max_model_len,
        )
    if params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"`min_tokens` is {params.min_tokens}, more than the {params.max_tokens} to be generated.",
            param="min_tokens",
        )


def check_value(value: object, expected: Any, name: str = "", note: str = "") -> None:
    """Check that a value is of the type `expected`, as msgspec has it; it is called `name`.

    Raises InvalidRequest that names the value, or what in it does not fit.
    """
    try:
        convert(value, expected)
    except Misfit as misfit:
        named = misfit.within(name) if name else misfit
        raise InvalidRequest(named.sentence(note), param=named.where) from None


def check_text(text: str, name: str) -> None:
    """Check that a value is a text without lone surrogates. Raises InvalidRequest that names it."""
    check_value(text, str, name)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"`{name}` holds a lone surrogate, which is no character.", param=name) from None
