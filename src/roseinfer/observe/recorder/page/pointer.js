// Moves, zooms and selects by wheel, pointer and touch.

import { ms, sentence } from "./words.js";

/** `page` has the data, the chart, the element of the tip, and what the page can do. */
export function listenToPointer(page) {
  const { data, chart, move, redraw, select, selectRequest, selectStep, tip } = page;
  const { canvas, overview } = chart,
    pointers = new Map();
  let drag = null;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const along = event.shiftKey
        ? event.deltaY || event.deltaX
        : Math.abs(event.deltaX) > Math.abs(event.deltaY)
          ? event.deltaX
          : 0;
      move(() =>
        along
          ? chart.pan(along / 800)
          : chart.zoom(Math.exp(Math.max(-90, Math.min(90, event.deltaY)) * 0.004), chart.time(place(event)[0])),
      );
    },
    { passive: false },
  );

  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, place(event));
    drag = { from: place(event), start: chart.start, end: chart.end, isMoved: false };
  });

  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (!pointers.has(event.pointerId)) return hover(x, y);
    const before = [...pointers.values()];
    pointers.set(event.pointerId, [x, y]);
    if (pointers.size === 2 && before.length === 2) {
      const after = [...pointers.values()],
        apart = (pair) => Math.max(20, Math.abs(pair[0][0] - pair[1][0]));
      drag.isMoved = true;
      return move(() => chart.zoom(apart(before) / apart(after), chart.time((after[0][0] + after[1][0]) / 2)));
    }
    if (Math.abs(x - drag.from[0]) > 4) drag.isMoved = true;
    if (!drag.isMoved) return;
    canvas.classList.add("dragging");
    tip.hidden = true;
    const by = ((drag.from[0] - x) / chart.plot) * (drag.end - drag.start);
    move(() => chart.show(drag.start + by, drag.end + by));
  });

  function release(event) {
    pointers.delete(event.pointerId);
    canvas.classList.remove("dragging");
    if (event.type === "pointerup" && drag && !drag.isMoved) {
      const { gap, step, request } = chart.at(...place(event));
      if (gap) select(gap, { reveal: false });
      else if (request) selectRequest(request);
      else selectStep(step ?? null);
    }
    if (!pointers.size) drag = null;
  }
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
    chart.hover = null;
    redraw();
  });

  function hover(x, y) {
    const { gap, request, step } = chart.at(x, y);
    if (chart.hover !== (request ?? null)) {
      chart.hover = request ?? null;
      redraw();
    }
    tip.hidden = !(gap || request || step);
    if (tip.hidden) return;
    const took = step && `step ${step.step_id}: ${step.kind}, ${ms(step.end_ns - step.start_ns)}`;
    tip.textContent = gap
      ? `${request.id}: ${sentence(gap, data)}`
      : request
        ? `${request.id}: ${stageAt(request, chart.time(x))}`
        : took;
    tip.style.left = `${Math.max(0, Math.min(x + 14, chart.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${y + 18}px`;
  }

  function centreOn(event) {
    const box = overview.getBoundingClientRect(),
      extent = data.extent;
    if (!extent) return;
    const at = extent[0] + ((event.clientX - box.left) / box.width) * (extent[1] - extent[0]),
      half = chart.span / 2;
    move(() => chart.show(at - half, at + half));
  }
  overview.addEventListener("pointerdown", (event) => {
    overview.setPointerCapture(event.pointerId);
    centreOn(event);
  });
  overview.addEventListener("pointermove", (event) => {
    if (event.buttons) centreOn(event);
  });
}

function stageAt(request, at) {
  if (request.first_token_ns !== null && at >= request.first_token_ns) return "decode";
  if (request.scheduled_ns && at >= request.scheduled_ns) return "prefill";
  return at >= (request.inbox_ns ?? request.tokenized_ns ?? Infinity) ? "queue" : "receive and tokenise";
}
