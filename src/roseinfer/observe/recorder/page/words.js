// Puts causes, limits and durations into words.
import { CAUSES } from "./causes.js";

const LIMITS = {
  "": "nothing",
  token_budget: "the token budget",
  prefill_seqs: "the number of prompts begun in one step",
  slots: "the places of active sequences",
  kv_blocks: "KV blocks",
  prefix: "a prefix being computed",
};

export const nameOf = (cause) => (CAUSES[cause] ?? [cause])[0];
export const adviceOf = (cause) => (CAUSES[cause] ?? ["", "", ""])[2];
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
