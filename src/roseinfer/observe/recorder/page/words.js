// Causes into words: what each is called, what it means in a sentence, and which option changes it. Knows no page.

// cause: [name, sentence given (detail), knob]
const CAUSES = {
  decode: ["decode", "decoding", "A faster device, a smaller model.dtype, model.quantization, or fewer rows."],
  prefill_of_others: [
    "prefill of others",
    "prefill of other requests",
    "scheduler.max_prefill_tokens bounds the prompt tokens of others in one step: smaller means shorter gaps and later first tokens.",
  ],
  batch_growth: [
    "batch growth",
    "more sequences decoded in this step than in the one before",
    "scheduler.max_num_seqs bounds the rows of a step.",
  ],
  graph_capture: [
    "graph capture",
    "a CUDA graph was captured first",
    "runner.cuda_graphs startup captures all sizes before the port is ready.",
  ],
  graph_miss: ["graph miss", "no CUDA graph could hold the step", "runner.cuda_graphs says when graphs are captured."],
  h2d_copy: [
    "copy to device",
    "the step's integers on their way to the device",
    "runner.staging pinned makes this copy cheaper.",
  ],
  sample_sync: [
    "sampling",
    "drawing tokens, or waiting for them on the host",
    "Greedy or plain sampling, and fewer log-probabilities, make it shorter.",
  ],
  schedule: ["scheduling", "the engine's own bookkeeping", "On a GPU, runner.pipeline_depth 1 hides it."],
  kv_wait: [
    "wait for KV blocks",
    "preempted, and waiting for KV blocks",
    "cache.num_blocks or cache.cpu_memory_mib makes room, scheduler.max_active_seqs admits fewer.",
  ],
  preempted: [
    "recomputation",
    "computing again what a preemption had thrown away",
    "cache.num_blocks or cache.cpu_memory_mib makes room, scheduler.max_active_seqs admits fewer.",
  ],
  not_selected: [
    "not its turn",
    "more sequences were active than one step decodes",
    "scheduler.max_num_seqs decodes more of them in a step.",
  ],
  gc: [
    "garbage collection",
    "a garbage collection stopped the interpreter",
    "Report it: neither process should collect while it serves.",
  ],
  engine_outbox: [
    "engine outbox",
    "told by the engine, on its way to the front end",
    "Look at the other causes of the front end: it had not read the message.",
  ],
  detokenize: ["detokenize", "tokens into text and frames", "server.stream_interval writes several tokens at once."],
  event_loop: [
    "event loop",
    "the front end was busy with something else",
    "server.stream_interval writes several tokens at once; server.max_inflight admits fewer requests.",
  ],
  client_backpressure: [
    "slow client",
    "the client, or the network, did not take the bytes",
    "Nothing in the server: the reader is slow.",
  ],
  scrape: ["metrics scrape", "the front end rendered metrics", "Scrape less often."],
  profiler: ["profiler", "a profiler was recording", "Wait until it is over."],
  unknown: [
    "unknown",
    "nothing that is measured explains it",
    "Most often another process had the processor: look at the host's limits, pinning and neighbours.",
  ],
};
const LIMITS = {
  "": "nothing",
  token_budget: "the token budget",
  prefill_seqs: "the number of prompts begun in one step",
  slots: "the places of active sequences",
  kv_blocks: "KV blocks",
  prefix: "a prefix being computed",
};

export const nameOf = (cause) => (CAUSES[cause] ?? [cause])[0];
export const knobOf = (cause) => (CAUSES[cause] ?? ["", "", ""])[2];
export const limitName = (limit) => LIMITS[limit] ?? limit;
export const colorOf = (cause) => `--c-${cause}`;

/** A length of nanoseconds as a person reads it: "31.2 ms". */
export function ms(ns, digits) {
  const value = ns / 1e6;
  if (value >= 9999.5) return `${(value / 1e3).toFixed(1)} s`;
  return `${value.toFixed(digits ?? (value < 0.995 ? 2 : value < 99.95 ? 1 : 0))} ms`;
}

/** Several ids as a phrase: "a", "a and b", "a, b and 3 others". */
export function listed(ids) {
  if (ids.length < 3) return ids.join(" and ");
  return `${ids[0]}, ${ids[1]} and ${ids.length - 2} other${ids.length > 3 ? "s" : ""}`;
}

/** What a gap went to, in words: "prefill of request abc: 31.2 of 43.0 ms". */
export function sentence(gap, data) {
  const part = gap.parts.find(([cause]) => cause === gap.cause)?.[1] ?? gap.end - gap.start;
  let what = (CAUSES[gap.cause] ?? ["", gap.cause])[1];
  if (gap.cause === "decode") {
    const steps = data.stepsIn(gap);
    if (steps.length)
      what = steps.length > 1 ? `computing ${steps.length} steps` : `decoding ${steps[0].num_decode_seqs} rows`;
  }
  if (gap.cause === "prefill_of_others") {
    const ids = data.prefilledIn(gap).map((request) => request.id);
    if (ids.length) what = `prefill of request${ids.length > 1 ? "s" : ""} ${listed(ids)}`;
  }
  const total = gap.end - gap.start,
    digits = total >= 99.95e6 ? 0 : total >= 0.995e6 ? 1 : 2;
  return `${what}: ${(part / 1e6).toFixed(digits)} of ${ms(total, digits)}`;
}
