// Keeps the server's answers as steps, requests in lanes, and gaps.

const MAX_STEPS = 4000, // beyond it the oldest are forgotten
  MAX_REQUESTS = 20000; // likewise: refused ones come without steps

export class Data {
  constructor() {
    this.clear();
  }

  clear() {
    this.meta = null;
    this.steps = []; // by step_id
    this.requests = new Map(); // serial -> request
    this.slow = []; // slow gaps by end
    this.interruptions = []; // {start, end, cause}
    this.next = null;
    this.lanes = []; // end of the last request in each
  }

  /** Take an answer in; another run of the server, or a recording, begins anew. */
  merge(answer) {
    if (this.meta && this.meta.run !== answer.meta.run) return this.clear(); // what is new since then is not all there is
    const seen = this.now;
    this.meta = answer.meta;
    this.next = answer.next;
    this.now = answer.now_ns;
    const fields = answer.step_fields,
      last = this.steps.at(-1)?.step_id ?? 0;
    for (const row of answer.steps) {
      const step = Object.fromEntries(fields.map((field, index) => [field, row[index]]));
      step.limit = answer.meta.limits[step.blocked_by];
      step.kind = step.num_prefill_seqs
        ? step.num_decode_seqs
          ? "mixed"
          : "prefill"
        : step.num_decode_seqs
          ? "decode"
          : "idle";
      if (step.step_id > last) this.steps.push(step);
    }
    for (const sent of answer.requests) this.#mergeRequest(sent);
    this.#endUnseen(new Set(answer.requests.map((sent) => sent.serial)), seen);
    for (const row of answer.gaps) this.#addGap(row, answer.meta.causes);
    for (const [start, end, cause] of answer.interruptions) {
      if (start > (this.interruptions.at(-1)?.start ?? -1))
        this.interruptions.push({ start, end, cause: answer.meta.causes[cause] });
    }
    this.slow.sort((a, b) => a.end - b.end);
    this.#forget();
  }

  #mergeRequest(sent) {
    const known = this.requests.get(sent.serial);
    const tokens = known ? known.token_ns : [];
    if (known && sent.tokens_from < known.tokens_from + tokens.length)
      tokens.length = Math.max(0, sent.tokens_from - known.tokens_from);
    const isJoined = known && sent.tokens_from === known.tokens_from + tokens.length;
    const request = known ?? { gaps: [], slow: [], ends: new Set() };
    Object.assign(request, sent, { first_write_ns: known?.first_write_ns ?? sent.first_write_ns });
    if (isJoined) {
      request.tokens_from = sent.tokens_from - tokens.length;
      request.token_ns = tokens.concat(sent.token_ns);
    }
    if (!known) {
      request.lane = this.#laneFor(request);
      this.requests.set(request.serial, request);
    }
    this.lanes[request.lane] = request.end_ns ?? Infinity;
  }

  /** Each answer has all requests in flight; one that is not in it ended while the page was paused, later than `seen`. */
  #endUnseen(sent, seen) {
    for (const request of this.requests.values())
      if (request.end_ns === null && !sent.has(request.serial)) request.end_ns = this.lanes[request.lane] = seen;
  }

  #laneFor(request) {
    const lane = this.lanes.findIndex((until) => until <= request.recv_ns);
    return lane < 0 ? this.lanes.length : lane;
  }

  #addGap([serial, , start, end, step_id, cause, isSlow, flat], causes) {
    const request = this.requests.get(serial);
    if (!request || request.ends.has(end)) return;
    const parts = [];
    for (let at = 0; at < flat.length; at += 2) parts.push([causes[flat[at]], flat[at + 1]]);
    parts.sort((a, b) => b[1] - a[1]);
    const known = this.stepById(step_id)?.tokens_ns ?? end; // when the step had made its token
    const gap = { request, start, known, end, step_id, cause: causes[cause], isSlow: Boolean(isSlow), parts };
    request.ends.add(end);
    request.gaps.push(gap);
    if (gap.isSlow) {
      request.slow.push(gap);
      this.slow.push(gap);
    }
  }

  #forget() {
    if (this.steps.length <= MAX_STEPS && this.requests.size <= MAX_REQUESTS) return;
    this.steps.splice(0, Math.max(0, this.steps.length - MAX_STEPS));
    const begin = this.steps[0]?.start_ns ?? 0;
    for (const [serial, request] of this.requests)
      if (request.end_ns && (request.end_ns < begin || this.requests.size > MAX_REQUESTS)) this.requests.delete(serial);
    this.#closeLanes();
    for (const request of this.requests.values()) {
      request.gaps = request.gaps.filter((gap) => gap.end >= begin);
      request.slow = request.slow.filter((gap) => gap.end >= begin);
    }
    this.slow = this.slow.filter((gap) => gap.end >= begin && this.requests.has(gap.request.serial));
    this.interruptions = this.interruptions.filter((one) => one.end >= begin);
  }

  /** Lanes without a remembered request would stay empty, since the first free one is taken. */
  #closeLanes() {
    const used = [...new Set([...this.requests.values()].map((request) => request.lane))].sort((a, b) => a - b);
    if (used.length === this.lanes.length) return;
    const place = new Map(used.map((lane, index) => [lane, index]));
    for (const request of this.requests.values()) request.lane = place.get(request.lane);
    this.lanes = used.map((lane) => this.lanes[lane]);
  }

  /** [start, end] of all that there is to see. */
  get extent() {
    let start = this.steps[0]?.start_ns ?? Infinity,
      end = this.steps.at(-1)?.end_ns ?? -Infinity;
    for (const request of this.requests.values()) {
      if (request.end_ns === null || request.end_ns >= start)
        end = Math.max(end, request.end_ns ?? request.token_ns.at(-1) ?? request.recv_ns);
    }
    for (const request of this.requests.values()) if (!this.steps.length) start = Math.min(start, request.recv_ns);
    return start < end ? [start, end] : null;
  }

  get numLanes() {
    let most = 0;
    for (const request of this.requests.values()) most = Math.max(most, request.lane + 1);
    return most;
  }

  /** The index of the first step that ends after a moment. */
  stepIndex(at) {
    return firstIndex(this.steps, (step) => step.end_ns > at);
  }

  stepById(id) {
    const step = this.steps[firstIndex(this.steps, (each) => each.step_id >= id)];
    return step?.step_id === id ? step : undefined;
  }

  /** The number of a gap's token, from 1: the one that its step made. */
  tokenOf(gap) {
    const step = this.stepById(gap.step_id),
      index = step ? gap.request.token_ns.lastIndexOf(step.tokens_ns) : -1;
    return index < 0 ? null : gap.request.tokens_from + index + 1;
  }

  /** Steps whose tokens became known in a gap: more than one where several were written at once. */
  stepsIn(gap) {
    const found = [];
    for (
      let index = this.stepIndex(gap.start);
      index < this.steps.length && this.steps[index].tokens_ns <= gap.end;
      index += 1
    ) {
      const step = this.steps[index];
      if (step.tokens_ns > gap.start && step.step_id <= gap.step_id && step.num_generated_tokens) found.push(step);
    }
    return found;
  }

  /** Requests whose prompts were computed in the steps that a gap lies in. */
  prefilledIn(gap) {
    const steps = this.stepsIn(gap).filter((step) => step.num_prefill_tokens);
    const isIn = (request) =>
      steps.some(
        (step) =>
          request.scheduled_ns <= step.start_ns &&
          (request.first_token_ns ?? Infinity) >= step.tokens_ns &&
          (request.end_ns ?? Infinity) >= step.start_ns, // one that its client gave up is not read any more
      );
    const found = [...this.requests.values()].filter(
      (request) => request !== gap.request && request.scheduled_ns && isIn(request),
    );
    return found.sort((a, b) => b.num_prompt_tokens - a.num_prompt_tokens);
  }

  get widest() {
    let widest = null;
    for (const request of this.requests.values()) {
      for (const gap of request.gaps) if (!widest || gap.end - gap.start > widest.end - widest.start) widest = gap;
    }
    return widest;
  }

  /** The four distributions, in nanoseconds, each sorted. */
  distributions() {
    const first = [],
      gaps = [],
      perToken = [],
      queue = [];
    for (const request of this.requests.values()) {
      const tokens = request.token_ns;
      if (request.is_streamed && request.first_write_ns !== null) first.push(request.first_write_ns - request.recv_ns);
      for (let index = 1; index < tokens.length; index += 1) gaps.push(tokens[index] - tokens[index - 1]);
      if (request.end_ns !== null && request.num_tokens > 1 && tokens.length)
        perToken.push((tokens.at(-1) - request.first_token_ns) / (request.num_tokens - 1));
      if (request.scheduled_ns && request.inbox_ns) queue.push(request.scheduled_ns - request.inbox_ns);
    }
    return [
      ["TTFT", "Time to first token of streams", first],
      ["ITL", "Inter-token latency", gaps],
      ["TPOT", "Time per output token", perToken],
      ["Queue wait", "Time in the queue", queue],
    ].map(([name, title, values]) => ({ name, title, values: Float64Array.from(values).sort() }));
  }
}

/** The index of the first item of which something holds, as it does of all behind it. */
export function firstIndex(items, holds) {
  let low = 0,
    high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(items[middle])) high = middle;
    else low = middle + 1;
  }
  return low;
}
