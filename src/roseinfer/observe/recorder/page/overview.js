// Draws all of the data into one small strip.

import { colorOf } from "./words.js";

/** Step times, slow gaps above them, and the chart's window. */
export function drawOverview(chart) {
  const { data, overview } = chart,
    context = overview.getContext("2d"),
    width = overview.clientWidth,
    height = 46,
    extent = data.extent;
  context.clearRect(0, 0, width, height);
  if (!extent) return;
  const x = (at) => ((at - extent[0]) / (extent[1] - extent[0])) * width,
    { steps } = data;
  let longest = 1;
  for (const step of steps) longest = Math.max(longest, step.end_ns - step.start_ns);
  for (const step of steps) {
    const tall = Math.max(1, ((step.end_ns - step.start_ns) / longest) * (height - 14));
    context.fillStyle = chart.color(step.num_prefill_tokens ? "--step-prefill" : "--step-decode");
    context.fillRect(x(step.start_ns), height - tall, Math.max(0.7, x(step.end_ns) - x(step.start_ns)), tall);
  }
  for (const gap of data.slow) {
    chart.shown.add(colorOf(gap.cause));
    context.fillStyle = chart.color(colorOf(gap.cause));
    context.fillRect(x(gap.end) - 1, 3, 2.5, 6);
  }
  const left = x(chart.start),
    right = x(chart.end);
  context.fillStyle = chart.color("--page");
  context.globalAlpha = 0.62;
  context.fillRect(0, 0, left, height);
  context.fillRect(right, 0, width - right, height);
  context.globalAlpha = 1;
  context.strokeStyle = chart.color("--rose");
  context.lineWidth = 2;
  context.strokeRect(Math.max(1, left), 1, Math.max(4, Math.min(width - 1, right) - Math.max(1, left)), height - 2);
}
