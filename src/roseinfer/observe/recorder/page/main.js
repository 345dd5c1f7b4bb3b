// Puts the page together: asks the server for what is new, and handles keys.

import { Chart } from "./chart.js";
import { Data } from "./data.js";
import { element, renderDetail, renderFigures, renderLegend, renderSlow } from "./panel.js";
import { listenToPointer } from "./pointer.js";

const POLL_MS = 1000,
  LIVE_SPAN_NS = 2e9;
const MAX_RECORDING_BYTES = 64 * 1024 * 1024;
const KEYS = [
  ["n", "next slow gap"],
  ["p", "previous slow gap"],
  ["w", "widest gap"],
  ["← →", "gap before, gap after"],
  ["↑ ↓", "the request above, below"],
  ["Shift ← →", "pan"],
  ["+ −", "zoom"],
  ["f", "show everything"],
  ["Home End", "to the beginning; follow the newest"],
  ["Space", "pause, go on"],
  ["Esc", "select nothing"],
  ["?", "this list"],
];

const find = (id) => document.getElementById(id);
const data = new Data(),
  chart = new Chart(find("chart"), find("overview"), data);
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const state = { isPaused: false, isFollowing: true, file: "", trouble: "", figuresAt: -Infinity };

// --- what is shown --------------------------------------------------------------------------------------------------

let isDue = false;
function redraw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw();
  });
}

function draw() {
  chart.draw();
  renderLegend(find("legend"), chart.shown);
}

function refresh() {
  find("empty").hidden = data.extent !== null;
  renderSlow(find("slow-list"), find("slow-note"), data, chart.selected, select);
  if (performance.now() - state.figuresAt > 900) {
    state.figuresAt = performance.now();
    renderFigures(find("figures"), data.distributions());
  }
  const meta = data.meta;
  if (meta)
    find("model").textContent = [meta.model_name, meta.device, meta.dtype, `roseinfer ${meta.version}`, meta.trigger]
      .filter(Boolean)
      .join(" · ");
  const [name, words] = state.trouble
    ? ["trouble", state.trouble]
    : state.file
      ? ["file", `recording ${state.file}`]
      : state.isPaused
        ? ["paused", "paused"]
        : ["live", state.isFollowing ? "live" : "live, view held"];
  find("status").dataset.state = name;
  if (find("status-text").textContent !== words) find("status-text").textContent = words;
  find("pause").textContent = state.file ? "Back to live" : state.isPaused ? "Go on" : "Pause";
  find("follow").disabled = Boolean(state.file) || (state.isFollowing && !state.isPaused);
  for (const id of ["next-slow", "previous-slow"]) find(id).disabled = !data.slow.length;
  redraw();
}

function select(gap, options = {}) {
  if (!gap) return;
  chart.selected = gap;
  chart.step = null;
  hold();
  if (options.reveal !== false) glide(() => chart.reveal(gap));
  renderDetail(find("detail"), data, gap, null);
  refresh();
}

function selectStep(step) {
  chart.selected = null;
  chart.step = step;
  if (step) hold();
  renderDetail(find("detail"), data, null, step);
  refresh();
}

/** A request that has no gap where it was clicked; of one that runs, the server knows more. */
async function selectRequest(request) {
  selectStep(null);
  hold();
  chart.hover = request;
  renderDetail(find("detail"), data, null, null, request, null);
  if (request.end_ns !== null || state.file) return;
  const answer = await ask(`requests/${encodeURIComponent(request.id)}`).catch(() => null);
  if (answer && chart.hover === request && !chart.selected) renderDetail(find("detail"), data, null, null, request, answer);
}

const hold = () => {
  state.isFollowing = false;
};

/** Change the window, smoothly where motion is welcome. */
let glideId = 0;
function glide(change) {
  const from = [chart.start, chart.end],
    id = ++glideId;
  change();
  const to = [chart.start, chart.end];
  if (calm.matches || document.hidden || (from[0] === to[0] && from[1] === to[1])) return redraw();
  const began = performance.now();
  const advance = (now) => {
    if (id !== glideId) return;
    const share = Math.min(1, Math.max(0, (now - began) / 220)),
      eased = 1 - (1 - share) ** 3;
    chart.start = from[0] + (to[0] - from[0]) * eased;
    chart.end = from[1] + (to[1] - from[1]) * eased;
    draw();
    if (share < 1) requestAnimationFrame(advance);
  };
  requestAnimationFrame(advance);
}

function move(change) {
  glideId += 1;
  hold();
  change();
  refresh();
}

function fit() {
  const extent = data.extent;
  if (extent) glide(() => chart.show(extent[0], extent[1]));
}

function followNewest() {
  const extent = data.extent;
  if (!extent) return;
  const span = Math.min(LIVE_SPAN_NS, Math.max(extent[1] - extent[0], 1e6));
  glide(() => chart.show(extent[1] - span * 0.97, extent[1] + span * 0.03));
}

function stepSlow(direction) {
  const { slow } = data;
  if (!slow.length) return;
  const at = chart.selected ? slow.indexOf(chart.selected) : -1;
  let index = at + direction;
  if (at < 0) {
    const here = chart.selected ? chart.selected.end : direction > 0 ? chart.start : chart.end;
    index = direction > 0 ? slow.findIndex((gap) => gap.end > here) : slow.findLastIndex((gap) => gap.end < here);
  }
  select(slow[(index + slow.length) % slow.length]);
}

function stepGap(direction) {
  const gap = chart.selected;
  if (!gap) return move(() => chart.pan(direction * 0.15));
  select(gap.request.gaps[gap.request.gaps.indexOf(gap) + direction]);
}

function stepLane(direction) {
  const at = chart.selected ? (chart.selected.start + chart.selected.end) / 2 : (chart.start + chart.end) / 2;
  const from = chart.selected?.request.lane ?? (direction > 0 ? -1 : data.numLanes);
  let best = null;
  for (const request of data.requests.values()) {
    if ((request.lane - from) * direction <= 0) continue;
    const gap = request.gaps.find((one) => one.start <= at && at <= one.end);
    if (gap && (!best || (best.request.lane - request.lane) * direction > 0)) best = gap;
  }
  select(best);
}

// --- asking ---------------------------------------------------------------------------------------------------------

async function ask(path, options) {
  const answer = await fetch(new URL(path, location.origin + location.pathname), options); // without a key in our own URL
  if (!answer.ok)
    throw new Error((await answer.json().catch(() => null))?.error?.message ?? `The server answered ${answer.status}.`);
  return answer.json();
}

async function poll() {
  if (state.isPaused || state.file || document.hidden) return;
  const cursor = data.next ? `?since=${data.next.since}&since_ns=${data.next.since_ns}` : "";
  try {
    const answer = await ask(`timeline/data${cursor}`);
    if (state.isPaused || state.file) return;
    const isNew = !data.extent;
    data.merge(answer);
    state.trouble = "";
    if (!data.meta) {
      state.isFollowing = true; // another run, on a clock of its own: no moment and no gap of the last one is in it
      reset();
    }
    if (state.isFollowing && (answer.steps.length || isNew)) followNewest();
  } catch (error) {
    state.trouble = sentenceOf(error);
  }
  refresh();
}

const sentenceOf = (error) => (error instanceof TypeError ? "the server does not answer" : error.message);

async function openFile(file) {
  try {
    if (file.size > MAX_RECORDING_BYTES) throw new Error("The recording is larger than 64 MiB.");
    const answer = await ask("recording/view", {
      method: "POST",
      body: file,
      headers: { "Content-Type": "application/octet-stream" },
    });
    state.file = file.name;
    state.trouble = "";
    reset();
    data.merge(answer);
    fit();
  } catch (error) {
    find("detail").replaceChildren(
      element("p", { class: "meta" }, `${file.name} was not opened`),
      element("p", { class: "cause" }, sentenceOf(error)),
    );
  }
  state.figuresAt = -Infinity;
  refresh();
}

function reset() {
  data.clear();
  chart.selected = chart.step = null;
  renderDetail(find("detail"), data, null, null);
}

function togglePause() {
  if (state.file) {
    state.file = "";
    state.isPaused = false;
    state.isFollowing = true;
    reset();
    poll();
  } else state.isPaused = !state.isPaused;
  refresh();
}

function follow() {
  state.isPaused = false;
  state.isFollowing = true;
  followNewest();
  refresh();
}

// --- keys and buttons -----------------------------------------------------------------------------------------------

listenToPointer({ data, chart, move, redraw, select, selectRequest, selectStep, tip: find("tip") });

const anywhere = {
  n: () => stepSlow(1),
  p: () => stepSlow(-1),
  w: () => select(data.widest),
  f: () => {
    hold();
    fit();
  },
  "+": () => move(() => chart.zoom(0.6)),
  "=": () => move(() => chart.zoom(0.6)),
  "-": () => move(() => chart.zoom(1 / 0.6)),
  "?": () => find("help").showModal(),
  Escape: () => selectStep(null),
};
const onChart = {
  ArrowLeft: (shift) => (shift ? move(() => chart.pan(-0.2)) : stepGap(-1)),
  ArrowRight: (shift) => (shift ? move(() => chart.pan(0.2)) : stepGap(1)),
  ArrowUp: () => stepLane(-1),
  ArrowDown: () => stepLane(1),
  End: follow,
  " ": togglePause,
  Enter: () => find("detail").focus(),
  Home: () => {
    const extent = data.extent;
    if (extent) {
      hold();
      glide(() => chart.show(extent[0], extent[0] + chart.span));
    }
  },
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || find("help").open) return;
  const isControl = event.target.closest?.("button, a, input, label");
  const action =
    (event.target === chart.canvas ? onChart[event.key] : undefined) ??
    anywhere[event.key] ??
    (event.key === " " && !isControl ? togglePause : undefined);
  if (!action) return;
  event.preventDefault();
  action(event.shiftKey);
});

for (const [id, action] of Object.entries({
  pause: togglePause,
  follow,
  "next-slow": () => stepSlow(1),
  "previous-slow": () => stepSlow(-1),
  widest: anywhere.w,
  fit: anywhere.f,
  "zoom-in": anywhere["+"],
  "zoom-out": anywhere["-"],
  "help-button": anywhere["?"],
}))
  find(id).addEventListener("click", () => action());
find("file").addEventListener("change", (event) => {
  const [file] = event.target.files;
  if (file) openFile(file);
  event.target.value = "";
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  chart.readColors();
  redraw();
});
new ResizeObserver(redraw).observe(chart.canvas.parentElement);

find("keys").append(
  ...KEYS.flatMap(([keys, meaning]) => [
    element("dt", {}, ...keys.split(" ").flatMap((key) => [element("kbd", {}, key), " "])),
    element("dd", {}, meaning),
  ]),
);
renderDetail(find("detail"), data, null, null);
renderFigures(find("figures"), data.distributions());
globalThis.timeline = { data, chart, poll, state }; // for the browser's console
(async function live() {
  for (;;) {
    await poll();
    await new Promise((resume) => setTimeout(resume, POLL_MS));
  }
})();
