// Draws requests, steps and gaps in a window of time, and finds what lies under a pixel.

import { firstIndex } from "./data.js";
import { drawNames } from "./names.js";
import { drawOverview } from "./overview.js";
import { colorOf } from "./words.js";

const AXIS = 20,
  STEPS = 40,
  FRONT = 9,
  FOOT = 6;
const MIN_SPAN = 20e3; // 20 µs

export class Chart {
  constructor(canvas, overview, data) {
    this.canvas = canvas;
    this.overview = overview;
    this.data = data;
    this.start = 0;
    this.end = 1e9;
    this.selected = null; // a gap
    this.step = null; // a step
    this.hover = null;
    this.absent = new Map(); // lane -> the request beside the window, where none is in it
    this.shown = new Set(); // names of the colours that the last drawing used
    this.readColors();
  }

  readColors() {
    const style = getComputedStyle(document.documentElement);
    this.color = (name) => this.colors[name] ?? (this.colors[name] = style.getPropertyValue(name).trim());
    this.colors = {};
  }

  get span() {
    return this.end - this.start;
  }
  get top() {
    return AXIS + STEPS + FRONT + 4;
  }
  get plot() {
    return Math.max(1, this.width - this.gutter);
  }
  x(at) {
    return this.gutter + ((at - this.start) / this.span) * this.plot;
  }
  time(x) {
    return this.start + ((x - this.gutter) / this.plot) * this.span;
  }
  y(lane) {
    return this.top + lane * this.row;
  }

  /** Fit the canvas to its box; true when its size changed. */
  resize() {
    const lanes = Math.max(this.data.numLanes, 8),
      box = this.canvas.parentElement.clientWidth;
    this.row = Math.min(24, Math.max(9, Math.floor(620 / lanes)));
    this.gutter = box < 600 ? 64 : 128;
    this.width = box;
    this.height = this.top + lanes * this.row + FOOT;
    this.#fit(this.canvas, this.width, this.height);
    this.#fit(this.overview, this.overview.clientWidth, 46);
  }

  #fit(canvas, width, height) {
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      if (canvas === this.canvas) canvas.style.height = `${height}px`;
    }
    canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  /** Show a window of time, within what there is and half a window around it. */
  show(start, end) {
    const extent = this.data.extent ?? [0, 1e9],
      whole = Math.max(extent[1] - extent[0], MIN_SPAN);
    const span = Math.min(Math.max(end - start, MIN_SPAN), whole * 1.1);
    const middle = Math.min(Math.max((start + end) / 2, extent[0]), extent[1]);
    this.start = middle - span / 2;
    this.end = middle + span / 2;
  }

  zoom(factor, at = (this.start + this.end) / 2) {
    this.show(at - (at - this.start) * factor, at + (this.end - at) * factor);
  }
  pan(share) {
    this.show(this.start + this.span * share, this.end + this.span * share);
  }

  /** Bring a gap into sight, and wide enough to be seen. */
  reveal(gap) {
    const length = gap.end - gap.start,
      pixels = (length / this.span) * this.plot;
    const span = pixels < 26 || pixels > this.plot * 0.6 ? length * 9 : this.span;
    const middle = (gap.start + gap.end) / 2;
    if (span !== this.span || gap.start < this.start || gap.end > this.end)
      this.show(middle - span / 2, middle + span / 2);
  }

  /** What lies at a point: {request, gap, step}. */
  at(x, y) {
    if (x < this.gutter) return {};
    const time = this.time(x),
      step = this.data.steps[this.data.stepIndex(time)];
    const within = step && step.start_ns <= time ? step : null;
    if (y < this.top) return { step: within };
    const lane = Math.floor((y - this.top) / this.row),
      slack = (2 / this.plot) * this.span;
    let found = null;
    for (const request of this.data.requests.values()) {
      if (request.lane === lane && request.recv_ns <= time + slack && this.endOf(request) >= time - slack)
        found = request;
    }
    if (!found) return { step: within };
    const near = (gap) => gap.start - slack <= time && time <= gap.end + slack;
    const gap = found.slow.find(near) ?? found.gaps.find((one) => one.start <= time && time <= one.end) ?? null;
    return { request: found, gap, step: within };
  }

  endOf(request) {
    return (
      request.end_ns ??
      Math.max(request.token_ns.at(-1) ?? 0, request.gaps.at(-1)?.end ?? 0, this.data.extent?.[1] ?? 0)
    );
  }

  /** The middle of a gap in CSS pixels of the canvas. */
  positionOf(gap) {
    return [this.x((gap.start + gap.end) / 2), this.y(gap.request.lane) + this.row / 2];
  }

  draw() {
    this.resize();
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, this.width, this.height);
    this.shown = new Set();
    this.#drawLanes(context);
    context.save();
    context.beginPath();
    context.rect(this.gutter, 0, this.plot, this.height);
    context.clip();
    this.#drawSteps(context);
    for (const request of this.data.requests.values()) this.#drawRequest(context, request);
    this.#drawInterruptions(context);
    this.#drawSelection(context);
    this.#drawAxis(context);
    context.restore();
    drawNames(this, context, AXIS + STEPS / 2);
    drawOverview(this);
  }

  #rect(context, name, start, end, y, height, least = 0) {
    const x = this.x(start),
      width = Math.max(this.x(end) - x, least);
    if (x > this.width || x + width < this.gutter || width <= 0) return;
    this.shown.add(name);
    context.fillStyle = this.color(name);
    context.fillRect(x, y, width, height);
  }

  #drawLanes(context) {
    context.fillStyle = this.color("--lane");
    for (let lane = 0; lane < Math.max(this.data.numLanes, 8); lane += 2)
      context.fillRect(0, this.y(lane), this.width, this.row);
  }

  /** Columns: how long each step took, and a band through all lanes where one computed prompts. */
  #drawSteps(context) {
    const { steps } = this.data,
      from = this.data.stepIndex(this.start);
    let longest = 1,
      until = from;
    for (; until < steps.length && steps[until].start_ns < this.end; until += 1)
      longest = Math.max(longest, steps[until].end_ns - steps[until].start_ns);
    const bottom = AXIS + STEPS,
      apart = (this.plot * (steps[from]?.end_ns - steps[from]?.start_ns || 1)) / this.span;
    for (const isPrefill of [false, true]) {
      for (let index = from; index < until; index += 1) {
        const step = steps[index];
        if (Boolean(step.num_prefill_tokens) !== isPrefill) continue;
        const height = Math.max(2, ((step.end_ns - step.start_ns) / longest) * (STEPS - 4));
        if (isPrefill) this.#rect(context, "--band", step.start_ns, step.end_ns, bottom, this.height, 1);
        this.#rect(
          context,
          isPrefill ? "--step-prefill" : "--step-decode",
          step.start_ns,
          step.end_ns - (apart > 5 ? this.span / this.plot : 0),
          bottom - height,
          height,
          1,
        );
      }
    }
    if (apart > 7) {
      context.fillStyle = this.color("--line");
      for (let index = from; index < until; index += 1)
        context.fillRect(Math.round(this.x(steps[index].start_ns)), bottom, 1, this.height);
    }
    if (this.step) {
      context.strokeStyle = this.color("--select");
      context.lineWidth = 1.5;
      context.strokeRect(
        this.x(this.step.start_ns),
        AXIS + 1,
        Math.max(3, this.x(this.step.end_ns) - this.x(this.step.start_ns)),
        STEPS - 1,
      );
    }
  }

  #drawRequest(context, request) {
    const end = this.endOf(request);
    if (request.recv_ns > this.end || end < this.start) return;
    const height = Math.max(6, this.row - 4),
      y = this.y(request.lane) + (this.row - height) / 2,
      middle = y + height / 2 - 1;
    const first = request.first_token_ns;
    const inbox = request.inbox_ns ?? request.tokenized_ns ?? end;
    this.#rect(context, "--arrive", request.recv_ns, Math.min(inbox, end), middle, 2, 1);
    this.#rect(
      context,
      "--queue",
      inbox,
      request.scheduled_ns ?? (first === null ? end : inbox),
      y + height * 0.2,
      height * 0.6,
    );
    if (request.scheduled_ns) this.#rect(context, "--prefill", request.scheduled_ns, first ?? end, y, height, 1.5);
    if (first === null) return this.#drawEnd(context, request, y, height);
    const newest = request.gaps.at(-1)?.end ?? first,
      begin = request.first_write_ns ?? first;
    this.#rect(context, "--decode", first, Math.max(newest, request.token_ns.at(-1) ?? first), y, height);
    if (begin > first) this.#rect(context, "--write", first, begin, y + height - 3, 3);
    this.#drawGaps(context, request, y, height);
    this.#drawEnd(context, request, y, height);
  }

  #drawGaps(context, request, y, height) {
    const { gaps } = request,
      mean = gaps.length ? (gaps.at(-1).end - gaps[0].start) / gaps.length : 0,
      scale = this.plot / this.span;
    if (mean * scale > 3) {
      const from = firstIndex(gaps, (gap) => gap.end > this.start),
        bottom = y + height - 3,
        shown = [];
      for (let index = from; index < gaps.length && gaps[index].start < this.end; index += 1) shown.push(gaps[index]);
      for (const { start, known, end } of shown) {
        const begin = Math.max(start, known);
        if ((end - begin) * scale > 0.3) this.#rect(context, "--write", begin, end, bottom, 3);
      }
      context.fillStyle = this.color("--decode-edge");
      for (const { end } of shown) context.fillRect(this.x(end) - 0.5, y, 1, height);
    }
    for (const gap of request.slow) this.#rect(context, colorOf(gap.cause), gap.start, gap.end, y - 1, height + 2, 2);
  }

  #drawEnd(context, request, y, height) {
    if (request.end_ns === null || request.end_ns > this.end || request.end_ns < this.start) return;
    const isWell = ["stop", "length", null].includes(request.finish_reason); // null: it ended while the page was paused
    if (!isWell) this.shown.add("--bad");
    context.fillStyle = this.color(isWell ? "--soft" : "--bad");
    context.fillRect(this.x(request.end_ns) - 1, y, isWell ? 1.5 : 4, height);
  }

  #drawInterruptions(context) {
    for (const one of this.data.interruptions)
      this.#rect(context, colorOf(one.cause), one.start, one.end, AXIS + STEPS + 1, FRONT - 2, 2);
  }

  #drawSelection(context) {
    const gap = this.selected;
    if (!gap) return;
    const x = this.x(gap.start),
      width = Math.max(3, this.x(gap.end) - x),
      y = this.y(gap.request.lane);
    context.fillStyle = this.color("--select");
    context.globalAlpha = 0.5;
    context.fillRect(x, AXIS, 1, y - AXIS);
    context.fillRect(x + width - 1, AXIS, 1, y - AXIS);
    context.globalAlpha = 1;
    context.strokeStyle = this.color("--select");
    context.lineWidth = 2;
    context.strokeRect(x - 1, y, width + 2, this.row);
  }

  #drawAxis(context) {
    const least = this.plot / (this.plot < 500 ? 3 : 8),
      raw = (this.span * least) / this.plot,
      power = 10 ** Math.floor(Math.log10(raw));
    const tick = [1, 2, 5, 10].map((by) => by * power).find((by) => by >= raw),
      origin = this.data.meta?.origin_unix_ms ?? 0;
    const minute = origin - (origin % 60e3),
      since = (origin - minute) * 1e6; // nanoseconds from that whole minute to the origin
    const digits = Math.max(0, 9 - Math.floor(Math.log10(tick) + 1e-9));
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (let at = Math.ceil((this.start + since) / tick) * tick; at < this.end + since; at += tick) {
      const x = Math.round(this.x(at - since)),
        date = new Date(minute + at / 1e6);
      const seconds = (at % 60e9) / 1e9;
      context.fillStyle = this.color("--line");
      context.fillRect(x, AXIS - 5, 1, 5);
      context.fillStyle = this.color("--soft");
      const [hours, minutes] = [date.getHours(), date.getMinutes()].map((part) => String(part).padStart(2, "0"));
      const label = `${hours}:${minutes}:${seconds.toFixed(digits).padStart(digits ? digits + 3 : 2, "0")}`;
      context.fillText(label, x + 3, AXIS / 2 - 1);
    }
  }
}
