// Shows what is selected: the cause in words, its parts as a bar, the step's numbers, and the distributions.
// Text from requests only ever becomes a text node.

import { adviceOf, colorOf, limitName, ms, nameOf, sentence } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; strings become text. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function swatch(name) {
  const made = element("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = `var(${name})`;
  return made;
}

const PHASES = {
  "--step-decode": "step",
  "--step-prefill": "step with prompts",
  "--arrive": "arriving",
  "--queue": "queue",
  "--prefill": "prefill",
  "--decode": "decode",
  "--write": "write",
  "--bad": "failed or cut",
};

/** What is on screen: phases, and causes of slow gaps and of interruptions. `shown` holds the colours' names. */
export function renderLegend(list, shown) {
  const phases = Object.keys(PHASES).filter((name) => shown.has(name)),
    causes = [...shown].filter((name) => name.startsWith("--c-")).sort();
  const key = [...phases, ...causes].join();
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(
    ...phases.map((name) => element("li", {}, swatch(name), PHASES[name])),
    ...(causes.length ? [element("li", {}, "slow gaps and pauses:")] : []),
    ...causes.map((name) => element("li", {}, swatch(name), nameOf(name.slice("--c-".length)))),
  );
}

/** `answer` is the server's answer about a request, where it was asked. */
export function renderDetail(box, data, gap, step, request, answer) {
  if (request) box.replaceChildren(...requestDetail(request, answer));
  else if (gap) box.replaceChildren(...gapDetail(data, gap));
  else if (step)
    box.replaceChildren(
      element("p", { class: "meta" }, "Selected step"),
      element("p", { class: "cause" }, `step ${step.step_id}: ${step.kind}, ${ms(step.end_ns - step.start_ns)}`),
      ...stepNumbers(step),
    );
  else
    box.replaceChildren(
      element("h2", {}, "Click a gap"),
      element(
        "p",
        { class: "meta" },
        "Each lane is a request, each column an engine step. A gap is the time between two tokens; its cause stands here, with all of its parts. Press n for the next slow one.",
      ),
    );
}

function gapDetail(data, gap) {
  const total = gap.end - gap.start,
    step = data.stepById(gap.step_id),
    advice = adviceOf(gap.cause),
    token = data.tokenOf(gap);
  const bar = element("div", {
    class: "bar",
    role: "img",
    "aria-label": gap.parts.map(([cause, ns]) => `${nameOf(cause)} ${ms(ns)}`).join(", "),
  });
  for (const [cause, ns] of gap.parts) {
    const piece = element("span", { title: `${nameOf(cause)}: ${ms(ns)}` });
    piece.style.background = `var(${colorOf(cause)})`;
    piece.style.width = `${(ns / total) * 100}%`;
    bar.append(piece);
  }
  const parts = element(
    "ul",
    { class: "parts" },
    ...gap.parts.map(([cause, ns]) =>
      element(
        "li",
        {},
        swatch(colorOf(cause)),
        nameOf(cause),
        element("span", { class: "number" }, ms(ns)),
        element("span", { class: "number share" }, `${((ns / total) * 100).toFixed(ns / total < 0.1 ? 1 : 0)} %`),
      ),
    ),
  );
  return [
    element(
      "p",
      { class: "meta" },
      `${gap.isSlow ? "Slow gap" : "Gap"} of ${ms(total)} before ${token ? `token ${token} of ` : "a token of "}${gap.request.id}`,
    ),
    element("p", { class: "cause", id: "cause" }, sentence(gap, data)),
    bar,
    parts,
    ...(advice && gap.isSlow ? [element("p", { class: "advice" }, advice)] : []),
    ...(step ? [element("h3", {}, `Step ${step.step_id}, which ended it`), ...stepNumbers(step)] : []),
    element("h3", {}, "Request"),
    ...requestNumbers(gap.request),
  ];
}

function requestDetail(request, answer) {
  const waiting = answer?.waiting,
    estimate = waiting?.estimate;
  return [
    element("p", { class: "meta" }, "Selected request"),
    element("p", { class: "cause" }, `${request.id}: ${answer?.stage ?? request.finish_reason ?? (request.end_ns === null ? "running" : "ended")}`),
    ...(waiting
      ? [
          element("p", { class: "knob" }, waiting.sentence),
          element(
            "p",
            { class: "meta" },
            `${waiting.is_place_exact ? "" : "About "}${waiting.num_before} before it. ` +
              (estimate
                ? `It may start in ${seconds(estimate.seconds)}, or in ${seconds(estimate.low_seconds)} to ${seconds(estimate.high_seconds)}.`
                : "When it may start is not known yet."),
          ),
        ]
      : []),
    element("h3", {}, "Request"),
    ...requestNumbers(request),
  ];
}

const seconds = (value) => ms(value * 1e9);

function numbers(rows) {
  return element(
    "dl",
    { class: "numbers" },
    ...rows
      .filter(Boolean)
      .flatMap(([name, value]) => [element("dt", {}, name), element("dd", { class: "number" }, value)]),
  );
}

function stepNumbers(step) {
  const launch = [
    ["stage", step.stage_ns],
    ["copy to device", step.h2d_ns],
    ["capture", step.capture_ns],
    ["forward", step.forward_ns],
    ["sample", step.sample_ns],
  ];
  return [
    numbers([
      ["took", ms(step.end_ns - step.start_ns)],
      ["kind", step.kind],
      ["decoding rows", String(step.num_decode_seqs)],
      step.num_prefill_seqs && [
        "prompt tokens",
        `${step.num_prefill_tokens} of ${step.num_prefill_seqs} request${step.num_prefill_seqs === 1 ? "" : "s"}`,
      ],
      ["running, waiting", `${step.num_running}, ${step.num_waiting}`],
      step.limit && ["held back by", limitName(step.limit)],
      step.num_preemptions && ["preempted", String(step.num_preemptions)],
      step.num_not_selected && ["not selected", String(step.num_not_selected)],
      step.num_draft_tokens && ["drafted, accepted", `${step.num_draft_tokens}, ${step.num_accepted_tokens}`],
      step.graph_rows && ["graph rows", String(step.graph_rows)],
      ["KV blocks in use", `${step.num_used_blocks} of ${step.num_total_blocks}`],
      ["schedule", ms(step.schedule_ns)],
      ["launch", ms(step.launch_ns)],
      ...launch.filter(([, ns]) => ns).map(([name, ns]) => [`— ${name}`, ms(ns)]),
      ["wait", ms(step.wait_ns)],
      ["commit", ms(step.commit_ns)],
      step.gc_ns && ["garbage collection", ms(step.gc_ns)],
      step.outbox_depth && ["outbox", `${step.outbox_depth} messages`],
    ]),
  ];
}

function requestNumbers(request) {
  const between = (start, end) => (start && end ? ms(end - start) : null);
  const rows = [
    ["id", request.id],
    ["prompt tokens", `${request.num_prompt_tokens}, ${request.num_cached_tokens} cached`],
    ["tokens", `${request.num_tokens} of ${request.max_tokens}`],
    ["queue", between(request.inbox_ns, request.scheduled_ns)],
    ["prefill", between(request.scheduled_ns, request.first_token_ns)],
    [request.is_streamed ? "first token after" : "answer after", between(request.recv_ns, request.first_write_ns)],
    ["ended", request.finish_reason ?? (request.end_ns === null ? "still running" : "while this page was paused")],
  ];
  return [numbers(rows.filter(([, value]) => value !== null))];
}

export function renderSlow(list, note, data, selected, choose) {
  const slowest = [...data.slow].sort((a, b) => b.end - b.start - (a.end - a.start)).slice(0, 40);
  note.textContent = data.slow.length
    ? `${data.slow.length} longer than usual; the longest first.`
    : "None: no gap was much longer than usual.";
  const key =
    slowest.map((gap) => `${gap.request.serial}.${gap.end}`).join() +
    (selected ? `|${selected.request.serial}.${selected.end}` : "");
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  const focused = [...list.querySelectorAll("button")].indexOf(document.activeElement);
  list.replaceChildren(
    ...slowest.map((gap) => {
      const button = element(
        "button",
        { type: "button" },
        swatch(colorOf(gap.cause)),
        element("span", { class: "number" }, ms(gap.end - gap.start)),
        element("span", {}, nameOf(gap.cause)),
        element("span", { class: "who" }, gap.request.id),
      );
      if (gap === selected) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => choose(gap));
      return element("li", {}, button);
    }),
  );
  if (focused >= 0) list.querySelectorAll("button")[focused]?.focus();
}

/** A histogram on a logarithmic axis, with the median and the 99th percentile. */
export function renderFigures(box, distributions) {
  box.replaceChildren(
    ...distributions.map(({ name, title, values }) => {
      const quantile = (share) => values[Math.min(values.length - 1, Math.floor(share * values.length))];
      const label = element("span");
      const caption = element("figcaption", {}, element("abbr", { title }, name), label);
      if (!values.length) {
        label.textContent = "no data yet";
        return element("figure", {}, caption, histogram([], 0, 0, "no data yet"), element("div", { class: "range" }));
      }
      const p50 = quantile(0.5),
        p99 = quantile(0.99),
        low = Math.max(values[0], 1e3) * 0.9,
        high = Math.max(values.at(-1), low * 2) * 1.05;
      label.append(
        element("span", { class: "together" }, "p50 ", element("b", {}, ms(p50))),
        " ",
        element("span", { class: "together" }, "p99 ", element("b", {}, ms(p99))),
      );
      const at = (value) => Math.log(Math.max(value, low) / low) / Math.log(high / low),
        bins = new Array(44).fill(0);
      for (const value of values) bins[Math.min(43, Math.floor(at(value) * 44))] += 1;
      const words = `${title}: median ${ms(p50)}, 99th percentile ${ms(p99)}, ${values.length} values`;
      return element(
        "figure",
        {},
        caption,
        histogram(bins, at(p50), at(p99), words),
        element(
          "div",
          { class: "range" },
          element("span", {}, ms(low)),
          element("span", {}, `n = ${values.length.toLocaleString("en")}`),
          element("span", {}, ms(high)),
        ),
      );
    }),
  );
}

function histogram(bins, p50, p99, words) {
  const svg = document.createElementNS(SVG, "svg"),
    most = Math.max(...bins, 1);
  const add = (tag, attributes) => {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    svg.append(made);
  };
  for (const [name, value] of Object.entries({
    viewBox: "0 0 440 46",
    preserveAspectRatio: "none",
    class: "histogram",
    role: "img",
    "aria-label": words,
  }))
    svg.setAttribute(name, value);
  add("line", { class: "axis", x1: 0, x2: 440, y1: 45.5, y2: 45.5 });
  bins.forEach((count, index) => {
    if (!count) return;
    const height = Math.max(1.5, Math.sqrt(count / most) * 42); // a square root: the tail is what one looks for
    add("rect", {
      x: index * 10 + 0.7,
      width: 8.6,
      y: 45 - height,
      height,
      class: index >= Math.floor(p99 * 44) && index > Math.floor(p50 * 44) ? "tail" : "",
    });
  });
  if (bins.length) for (const share of [p50, p99]) add("line", { x1: share * 440, x2: share * 440, y1: 0, y2: 45 });
  return svg;
}
