"""Lists the fields of other servers that are not served here: what is accepted of them, and what there is instead.

A value is accepted that asks for what is done anyway, and every value of a field that does not concern the answer, such
as one for billing, routing or images. Anything else would change the answer and is refused. The names are those of
OpenAI, vLLM, SGLang and llama.cpp.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unserved:
    """A field without a service behind it."""

    neutral: tuple[object, ...] = ()  # values that ask for what is done anyway
    instead: str = ""  # what to use, in the error for another value
    is_ignored: bool = False  # every value is accepted

    def accepts(self, value: object) -> bool:
        """Whether a value, which is not null, has no effect."""
        return self.is_ignored or any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in self.neutral
        )


def _rows(names: Iterable[str], *neutral: object, instead: str = "") -> dict[str, Unserved]:
    return dict.fromkeys(names, Unserved(neutral, instead))


def _ignored(*names: str) -> dict[str, Unserved]:
    return dict.fromkeys(names, Unserved(is_ignored=True))


_IGNORED = (
    *("store", "verbosity", "prompt_cache_retention", "prompt_cache_options", "cache_control", "provider"),
    *("session_id", "mm_processor_kwargs", "media_io_kwargs", "return_mm_kwargs", "use_audio_in_video"),
    *("images_config", "max_dynamic_patch", "min_dynamic_patch", "custom_labels", "extra_key", "ngram_corpus_id"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank", "routed_dp_rank"),
    *("data_parallel_rank", "routed_experts_start_len", "routed_experts_prompt_start", "guided_decoding_backend"),
    *("cache_prompt", "id_slot", "n_cache_reuse", "n_keep", "n_discard", "sse_ping_interval", "backend_sampling"),
    # Settings of what is off: of beams, of cutting prompts, of samplers that are not there.
    *("length_penalty", "early_stopping", "truncation_side", "spaces_between_special_tokens", "dry_base"),
    *("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold", "mirostat_tau"),
    *("mirostat_eta", "dynatemp_exponent", "repeat_last_n"),
)

_ADDED = "a text gets the model's, a chat its template's; token ids are taken as they are"
_OF_A_CHAT = "use /v1/chat/completions"
_GUIDED = ("json", "regex", "choice", "grammar")

# Of every body that asks for tokens.
OF_SAMPLING: dict[str, Unserved] = {
    **_ignored(*_IGNORED),
    **{f"guided_{name}": Unserved((), f"use `structured_outputs` with `{name}`") for name in _GUIDED},
    **_rows(("regex",), instead="use `structured_outputs` with `regex`"),
    **_rows(("stop_regex",), instead="use `stop`"),
    **_rows(("ebnf", "structural_tag", "guided_whitespace_pattern"), instead="use `structured_outputs` with `grammar`"),
    **_rows(("grammar",), "", instead="use `structured_outputs` with `grammar`"),
    **_rows(("json_schema",), instead="use `structured_outputs` with `json`"),
    **_rows(("allowed_token_ids",), instead="use `structured_outputs`, or `logit_bias`"),
    **_rows(("bad_words",), [], instead="use `structured_outputs`, or `logit_bias`"),
    **_rows(("custom_logit_processor",), instead="use `logit_bias`"),
    **_rows(("logits_processors",), [], instead="use `logit_bias`"),
    **_rows(("custom_params", "session_params", "vllm_xargs"), {}),
    **_rows(("use_beam_search",), False, instead="beams are not searched"),
    **_rows(("skip_special_tokens",), True, instead="special tokens are always left out of the text"),
    **_rows(("no_stop_trim",), False, instead="use `include_stop_str_in_output`"),
    **_rows(("truncate_prompt_tokens",), instead="a prompt is never cut"),
    **_rows(("prompt_logprobs",), False, instead="use `echo` with `logprobs`, of /v1/completions"),
    **_rows(("logprob_token_ids",), instead="the likeliest tokens have log-probabilities, by `logprobs`"),
    **_rows(("n_probs",), 0, instead="use `logprobs`"),
    **_rows(("post_sampling_probs",), False, instead="log-probabilities are the model's own, by `logprobs`"),
    **_rows(("return_token_ids", "return_tokens", "return_prompt_token_ids"), False, instead="/tokenize has them"),
    **_rows(("return_tokens_as_token_ids", "return_token_offsets"), False, instead="/tokenize has them"),
    **_rows(("return_prompt_text",), False, instead="/tokenize with `return_token_strs` shows it"),
    **_rows(("return_cached_tokens_details",), False, instead="`usage.prompt_tokens_details` counts them"),
    **_rows(("timings_per_token", "return_progress", "return_meta_info"), False, instead="use x-roseinfer-ledger"),
    **_rows(("return_hidden_states", "return_routed_experts", "watermarking"), False),
    **_rows(("response_fields",), []),
    **_rows(("repeat_penalty",), 1, instead="use `repetition_penalty`"),
    **_rows(("repetition_detection",), instead="use `repetition_penalty`"),
    **_rows(("mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "min_keep", "n_indent"), 0),
    **_rows(("typical_p", "typ_p", "tfs_z"), 1, instead="use `min_p`"),
    **_rows(("top_n_sigma",), -1, 0, instead="use `min_p`"),
    **_rows(("samplers", "sampler_seq"), instead="their order is fixed: temperature, `top_k`, `top_p`, `min_p`"),
    **_rows(("n_predict",), instead="use `max_tokens`"),
    **_rows(("n_cmpl",), 1, instead="use `n`"),
    **_rows(("t_max_predict_ms",), 0, instead="use `timeout_s`"),
    **_rows(("request_id", "rid"), instead="use the header `x-request-id`"),
    **_rows(("lora_path",), instead="one model is served"),
    **_rows(("lora",), [], instead="one model is served"),
    **_rows(("kv_transfer_params", "ec_transfer_params", "moderation")),
    # Of OpenAI's Responses and Anthropic's Messages: what wants a server with a memory, or tools of its own.
    **_rows(("previous_response_id", "conversation", "container"), instead="nothing is stored here; send all turns"),
    **_rows(("background",), False, instead="nothing is stored here; use `stream`"),
    **_rows(("mcp_servers",), [], instead="give the tools in `tools`"),
}

OF_COMPLETIONS: dict[str, Unserved] = {
    **_rows(("tools", "functions", "include"), [], instead=_OF_A_CHAT),
    **_rows(("tool_choice", "function_call"), "none", "auto", instead=_OF_A_CHAT),
    **_rows(("parallel_tool_calls", "include_reasoning"), True, instead=_OF_A_CHAT),
    **_rows(("reasoning", "chat_template_kwargs"), {}, instead=_OF_A_CHAT),
    **_rows(("reasoning_effort", "thinking", "thinking_token_budget", "enable_thinking"), instead=_OF_A_CHAT),
    **_rows(("system", "instructions"), "", instead="write it into `prompt`"),
    **_rows(("text", "output_config", "output_format"), {}, instead="`response_format` is its name here"),
    **_rows(("stop_sequences",), [], instead="`stop` is its name here"),
    **_rows(("top_logprobs",), 0, instead="`logprobs` is its name here"),
    **_rows(("truncation",), "disabled", "auto"),
    **_rows(("suffix",), "", instead="write your model's tokens for infilling into `prompt`"),
    **_rows(("add_special_tokens",), True, instead=_ADDED),
    **_rows(("prompt_embeds",)),
    **_rows(("messages",), instead="a completion takes `prompt`; /v1/chat/completions takes `messages`"),
    **_rows(("input",), instead="a completion takes `prompt`; /v1/responses takes `input`"),
    **_rows(("max_completion_tokens", "max_output_tokens"), instead="`max_tokens` is its name here"),
}

OF_CHAT: dict[str, Unserved] = {
    **_rows(("instructions",), "", instead="a chat takes it as a message of the role system"),
    **_rows(("text", "output_format"), {}, instead="`response_format` is its name here"),
    **_rows(("include",), [], instead="`logprobs` and `reasoning_content` are asked for by their own fields"),
    **_rows(("truncation",), "disabled", "auto"),
    **_rows(("modalities",), ["text"]),
    **_rows(("audio", "prediction", "web_search_options", "task", "tool_prompt")),
    **_rows(("best_of",), 1, instead="use `n`"),
    **_rows(("echo", "continue_final_message"), False, instead="/v1/completions continues a text"),
    **_rows(("add_generation_prompt",), True, instead="/v1/completions continues a text"),
    **_rows(("add_special_tokens",), False, instead=_ADDED),
    **_rows(("input_ids",), instead="use `prompt`, of /v1/completions"),
    **_rows(("documents",), [], instead="write them into a message"),
    **_rows(("chat_template",), instead="it is an option of the server, `server.chat_template`"),
    **_rows(("parse_tool_calls",), True),
    **_rows(("input",), instead="a chat takes `messages`; /v1/responses takes `input`"),
    **_rows(("prompt",), instead="a chat takes `messages`; /v1/completions takes `prompt`"),
    **_rows(("system",), "", instead="a chat takes it as a message of the role system; /v1/messages has this field"),
    **_rows(("stop_sequences",), [], instead="`stop` is its name here"),
    **_rows(("output_config",), {}, instead="`response_format` and `reasoning_effort` are its names here"),
    **_rows(("max_output_tokens",), instead="`max_completion_tokens` is its name here"),
}

OF_MESSAGES: dict[str, Unserved] = {
    **_ignored("metadata", "service_tier", "context_management", "diagnostics", "fallbacks", "inference_geo", "speed"),
    **_ignored("user_profile_id", "workspace_id", "billing_policy", "fallback_credit_token"),
    **_ignored("stream_options", "user", "safety_identifier", "prompt_cache_key"),
    **_rows(("n", "best_of"), 1, instead="an answer is one message; use /v1/chat/completions"),
    **_rows(("echo", "logprobs"), False, instead=_OF_A_CHAT),
    **_rows(("top_logprobs",), 0, instead=_OF_A_CHAT),
    **_rows(("functions",), [], instead="use `tools`"),
    **_rows(("include",), []),
    **_rows(("function_call",), "none", "auto", instead="use `tool_choice`"),
    **_rows(("parallel_tool_calls",), True, instead="`tool_choice.disable_parallel_tool_use` is its name here"),
    **_rows(("instructions",), "", instead="`system` is its name here"),
    **_rows(("text",), {}, instead="`output_config.format` is its name here"),
    **_rows(("reasoning",), {}, instead="use `thinking`, or `output_config.effort`"),
    **_rows(("enable_thinking",), instead="use `thinking`"),
    **_rows(("thinking_token_budget",), instead="`thinking.budget_tokens` is its name here"),
    **_rows(("include_reasoning",), True),
    **_rows(("truncation",), "disabled", "auto"),
    **_rows(("thread",), instead="no conversation is kept here; send all of its messages"),
    **_rows(("input",), instead="this API takes `messages`; /v1/responses takes `input`"),
    **_rows(("prompt",), instead="this API takes `messages`; /v1/completions takes `prompt`"),
    **_rows(("stop",), instead="`stop_sequences` is its name here"),
    **_rows(("max_completion_tokens", "max_output_tokens"), instead="`max_tokens` is its name here"),
    **_rows(("response_format",), instead="`output_config.format` is its name here"),
    **_rows(("reasoning_effort",), instead="`output_config.effort` is its name here"),
}

OF_RESPONSES: dict[str, Unserved] = {
    **_ignored("client_metadata", "context_management", "max_tool_calls"),
    **_ignored("access_programs", "background_options", "image"),
    **_rows(("best_of",), 1, instead="a response is one answer; use /v1/chat/completions"),
    **_rows(("echo",), False, instead="/v1/completions continues a text"),
    **_rows(("logprobs",), False, instead="use `include` with `message.output_text.logprobs`"),
    **_rows(("functions",), [], instead="use `tools`"),
    **_rows(("function_call",), "none", "auto", instead="use `tool_choice`"),
    **_rows(("system",), "", instead="`instructions` is its name here"),
    **_rows(("stop_sequences",), [], instead="`stop` is its name here"),
    **_rows(("output_config", "output_format"), {}, instead="use `text` with `format`, and `reasoning` with `effort`"),
    **_rows(("thinking", "enable_thinking"), instead="use `reasoning` with `effort`, or `thinking_token_budget`"),
    **_rows(("include_reasoning",), True),
    **_rows(("conversation",), instead="nothing is stored here; send the whole conversation as `input`"),
    **_rows(("previous_response_id",), instead="nothing is stored here; send the earlier items with `input`"),
    **_rows(("prompt",), instead="nothing is stored here; use `input`, or `prompt` with /v1/completions"),
    **_rows(("messages",), instead="a response takes `input`; /v1/chat/completions takes `messages`"),
    **_rows(("max_tokens", "max_completion_tokens"), instead="`max_output_tokens` is its name here"),
    **_rows(("n",), 1, instead="a response is one answer; use /v1/chat/completions"),
    **_rows(("response_format",), instead="use `text` with `format`"),
    **_rows(("reasoning_effort",), instead="use `reasoning` with `effort`"),
}

OF_EMBEDDINGS: dict[str, Unserved] = {
    **_ignored("mm_processor_kwargs", "media_io_kwargs", "truncation_side"),
    **_rows(("add_special_tokens",), True, instead=_ADDED),
    **_rows(("normalize", "use_activation"), True, instead="it is what the checkpoint's modules say"),
    **_rows(("truncate_prompt_tokens",), -1, instead="nothing is cut: a text that does not fit is a 400"),
    **_rows(("embed_dtype", "output_dtype"), "float32", "float", instead="use `encoding_format`"),
    **_rows(("messages",), instead="write the text into `input`, as the model's own template has it"),
    **_rows(("prompt", "text", "texts", "inputs"), instead="`input` is its name here"),
    **_rows(("input_type", "task", "instruction"), instead="write the instruction into `input`"),
    **_rows(("stream",), False, instead="the answer comes whole"),
}

OF_TOKENIZE: dict[str, Unserved] = {
    **_rows(("tools",), [], instead="the answer's `usage` of /v1/chat/completions counts them"),
    **_rows(("continue_final_message", "return_token_offsets"), False),
    **_rows(("input", "text", "content"), instead="`prompt` is its name here"),
    **_rows(("chat_template",), instead="it is an option of the server, `server.chat_template`"),
    **_ignored("mm_processor_kwargs", "media_io_kwargs"),
}

OF_DETOKENIZE = _rows(("ids", "input_ids", "token_ids"), instead="`tokens` is its name here")
