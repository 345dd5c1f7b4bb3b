// Draws the names beside the lanes: who is in each, or who is found to the left or right.

/** `stepsY` is the middle of the row of steps. */
export function drawNames(chart, context, stepsY) {
  const size = chart.row < 12 ? 9 : 11,
    write = (text, y) => context.fillText(shorten(context, text, chart.gutter - 12), 4, y);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.fillStyle = chart.color("--soft");
  write("steps", stepsY);
  const { selected } = chart,
    names = new Map();
  for (const request of chart.data.requests.values()) {
    if (request.recv_ns <= chart.end && chart.endOf(request) >= chart.start) names.set(request.lane, request);
  }
  if (selected) names.set(selected.request.lane, selected.request);
  for (const [lane, request] of names) {
    const isChosen = request === selected?.request || request === chart.hover;
    context.fillStyle = chart.color(isChosen ? "--ink" : "--soft");
    context.font = `${isChosen ? "600 " : ""}${size}px system-ui, sans-serif`;
    write(request.id, chart.y(lane) + chart.row / 2);
  }
  chart.absent = absentOf(chart, names);
  context.globalAlpha = 0.6;
  context.fillStyle = chart.color("--soft");
  context.font = `${size}px system-ui, sans-serif`;
  for (const [lane, { text }] of chart.absent) write(text, chart.y(lane) + chart.row / 2);
  context.globalAlpha = 1;
}

/** For lanes without a request in sight: the last one to the left or, where there is none, the first to the right. */
function absentOf(chart, names) {
  const absent = new Map();
  for (const { lane, recv_ns: at, id } of chart.data.requests.values()) {
    if (names.has(lane)) continue;
    const isLeft = at < chart.start,
      known = absent.get(lane),
      isCloser = !known || (isLeft ? !known.isLeft || at > known.at : !known.isLeft && at < known.at);
    if (isCloser) absent.set(lane, { isLeft, at, text: `${isLeft ? "‹" : "›"} ${id}` });
  }
  return absent;
}

function shorten(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let length = Math.min(text.length, 40);
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
  return `${text.slice(0, length)}…`;
}
