// The run as areas stacked by role, which one can zoom, pan and point into.

const EDGES = { left: 76, right: 12, top: 46, bottom: 30 };
const PLOT = 320;
const MODULES = 90;
const NEAR = 2.5;

/** The picture of `run`; `choose` is told the event that is looked at. */
function touchableChart(run, choose) {
  const chart = { run, choose, width: 0, from: 0, to: run.events, event: run.moment ?? summit(run), most: [...run.reserved, ...(run.other?.levels ?? [])].reduce((most, level) => Math.max(most, level), 1) };
  // A card whose memory is near is part of the picture.
  if (run.card?.bytes <= NEAR * chart.most) [chart.most, chart.limit] = [Math.max(chart.most, run.card.bytes), run.card.bytes];
  chart.svg = draw("svg", {
    class: "chart", tabindex: 0, role: "slider", "aria-label": "Moment of the run", "aria-valuemin": 0,
    "aria-valuemax": run.events - 1, onkeydown: (event) => moveByKey(chart, event),
    onpointermove: (event) => point(chart, event), onpointerleave: () => hint.hide(),
    onpointerdown: (event) => startSelection(chart, event),
    onpointerup: (event) => endSelection(chart, event),
    onclick: (event) => { if (!chart.wasSelecting) chooseEvent(chart, eventAt(chart, event)); },
  });
  chart.zoom = d3.zoom()
    // A wheel that only scrolls the page leaves the picture alone, and a mouse that is dragged selects.
    .filter((event) => !event.button && (event.type === "wheel" ? event.ctrlKey || event.metaKey : event.type !== "mousedown" || event.shiftKey))
    .on("zoom", ({ transform }) => follow(chart, transform));
  const zoomBy = (factor) => () => d3.select(chart.svg).call(chart.zoom.scaleBy, factor);
  chart.tools = make("div", { class: "tools" },
    make("button", { type: "button", onclick: () => showPeak(chart) }, "Peak"),
    make("button", { type: "button", "aria-label": "Zoom in", onclick: zoomBy(2) }, "+"),
    make("button", { type: "button", "aria-label": "Zoom out", onclick: zoomBy(0.5) }, "−"),
    make("button", { type: "button", onclick: () => showAll(chart) }, "Whole run"));
  const remark = make("p", { class: "remark" }, "Click a moment to see everything alive then. To zoom, drag over a stretch, double-click, or scroll with Ctrl; to pan, drag with Shift. ← and → move by one event, Page Up and Page Down by one phase.");
  chart.overview = overview(chart);
  chart.element = make("div", { class: "timeline" }, chart.tools, chart.svg, chart.overview, remark);
  const redrawn = oncePerFrame(() => redrawChart(chart));
  chart.redraw = redrawn;
  new ResizeObserver(([entry]) => resize(chart, entry.contentRect.width)).observe(chart.element);
  d3.select(chart.svg).call(chart.zoom).on("dblclick.zoom", null);
  chart.svg.addEventListener("dblclick", () => zoomBy(3)());
  return chart;
}

function resize(chart, width) {
  if (Math.abs(width - chart.width) < 1) return;
  chart.width = width;
  const height = EDGES.top + PLOT + EDGES.bottom;
  chart.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.svg.setAttribute("height", height);
  const extent = [[EDGES.left, 0], [width - EDGES.right, height]];
  chart.zoom.extent(extent).translateExtent(extent).scaleExtent([1, Math.max(1, chart.run.events / 8)]);
  showAll(chart);
  redrawChart(chart);
}

/** The events that the zoomed picture shows. */
function follow(chart, transform) {
  const { left, right } = sides(chart);
  const at = (x) => (transform.invertX(x) - left) / (right - left) * chart.run.events;
  [chart.from, chart.to] = [at(left), at(right)];
  chart.redraw();
}

function sides(chart) {
  return { left: EDGES.left, right: chart.width - EDGES.right };
}

function xOf(chart, event) {
  const { left, right } = sides(chart);
  return left + (right - left) * (event - chart.from) / (chart.to - chart.from);
}

function yOf(chart, bytes) {
  return EDGES.top + PLOT * (1 - bytes / chart.most);
}

function eventAt(chart, pointer) {
  const { left, right } = sides(chart);
  const x = pointer.clientX - chart.svg.getBoundingClientRect().left;
  const event = Math.floor(chart.from + (chart.to - chart.from) * (x - left) / (right - left));
  return Math.min(Math.max(event, 0), chart.run.events - 1);
}

// Moving

function showAll(chart) {
  d3.select(chart.svg).call(chart.zoom.transform, d3.zoomIdentity);
}

function showPeak(chart) {
  chooseEvent(chart, summit(chart.run));
  keepInSight(chart);
}

function chooseEvent(chart, event) {
  const { run } = chart;
  chart.event = event;
  chart.svg.setAttribute("aria-valuenow", event);
  chart.svg.setAttribute("aria-valuetext", `event ${count(event)}, ${placeOf(run, event)}, live ${size(run.total[event])}`);
  chart.redraw();
  chart.choose(event);
  remember("event", event);
}

/** Pans to the moment that is looked at where the zoomed picture does not show it. */
function keepInSight(chart) {
  if (chart.event >= chart.from && chart.event < chart.to) return;
  const { left, right } = sides(chart);
  const x = left + (right - left) * (chart.event + 0.5) / chart.run.events;
  d3.select(chart.svg).call(chart.zoom.translateTo, x, 0);
}

function moveByKey(chart, key) {
  const { run, event } = chart;
  const phase = run.phaseAt[event];
  const far = Math.max(1, Math.round((chart.to - chart.from) / 50));
  const zooms = { "+": 2, "=": 2, "-": 0.5 };
  const target = {
    ArrowLeft: event - (key.shiftKey ? far : 1), ArrowRight: event + (key.shiftKey ? far : 1), Home: 0, End: run.events - 1,
    PageUp: run.phases[Math.max(phase - 1, 0)].start, PageDown: run.phases[Math.min(phase + 1, run.phases.length - 1)].start,
    p: summit(run),
  }[key.key];
  if (target === undefined && !zooms[key.key] && key.key !== "0") return;
  key.preventDefault();
  if (zooms[key.key]) d3.select(chart.svg).call(chart.zoom.scaleBy, zooms[key.key]);
  else if (key.key === "0") showAll(chart);
  else {
    chooseEvent(chart, Math.min(Math.max(target, 0), run.events - 1));
    keepInSight(chart);
  }
}

/** A stretch that the mouse is dragged over is shown alone. */
function startSelection(chart, pointer) {
  chart.wasSelecting = false;
  chart.selected = pointer.pointerType === "mouse" && !pointer.button && !pointer.shiftKey ? [pointer.clientX, pointer.clientX] : null;
}

function select(chart, pointer) {
  chart.selected[1] = pointer.clientX;
  chart.wasSelecting ||= Math.abs(chart.selected[1] - chart.selected[0]) > 4;
  if (chart.wasSelecting && !chart.svg.hasPointerCapture(pointer.pointerId)) chart.svg.setPointerCapture(pointer.pointerId);
  chart.redraw();
}

function endSelection(chart) {
  const [from, to] = (chart.selected ?? []).map((clientX) => eventAt(chart, { clientX })).sort((a, b) => a - b);
  chart.selected = null;
  if (chart.wasSelecting) showStretch(chart, from, to + 1);
}

function showStretch(chart, start, stop) {
  const { left, right } = sides(chart), { events } = chart.run;
  const scale = Math.min(events / (stop - start), chart.zoom.scaleExtent()[1]);
  const first = Math.min(Math.max((start + stop - events / scale) / 2, 0), events - events / scale);
  const transform = d3.zoomIdentity.translate(left - scale * (left + (right - left) * first / events), 0).scale(scale);
  d3.select(chart.svg).call(chart.zoom.transform, transform);
}

function point(chart, pointer) {
  if (pointer.buttons && chart.selected) select(chart, pointer);
  if (pointer.buttons) return hint.hide();
  const { run } = chart, event = eventAt(chart, pointer);
  const roles = run.roles.filter((role) => run.live[role][event]).map((role) => `${role}: ${size(run.live[role][event])}`);
  hint.show([placeOf(run, event), `live ${size(run.total[event])}${run.other ? ` (${run.other.name} ${size(run.other.levels[event])})` : ""} · allocated ${size(run.allocated[event])} · reserved ${size(run.reserved[event])}`, ...roles], pointer.clientX, pointer.clientY);
}

// Drawing

function redrawChart(chart) {
  if (!chart.width) return;
  const { run } = chart;
  const start = Math.max(0, Math.floor(chart.from)), stop = Math.min(run.events, Math.ceil(chart.to));
  const columns = standIns(run, start, stop, Math.max(1, Math.round(chart.width - EDGES.left - EDGES.right)));
  columns.push({ from: stop, event: null });
  const { left, right } = sides(chart);
  const clip = draw("svg", { x: left, y: 0, width: right - left, height: EDGES.top + PLOT + EDGES.bottom, viewBox: `${left} 0 ${right - left} ${EDGES.top + PLOT + EDGES.bottom}` },
    ...bands(chart, start, stop), ...areas(chart, columns),
    ...(run.other ? [levelLine(chart, columns, run.other.levels, "other")] : []),
    levelLine(chart, columns, run.allocated, "allocated"), levelLine(chart, columns, run.reserved, "reserved"), ...cardLine(chart), ...marks(chart), selection(chart));
  chart.svg.replaceChildren(...axis(chart), clip);
  redrawOverview(chart);
}

function axis(chart) {
  const { left, right } = sides(chart), unit = unitFor(chart.most);
  return [
    draw("text", { class: "soft", x: left - 8, y: EDGES.top - 12, "text-anchor": "end" }, unit.name),
    ...ticks(chart.most, unit).flatMap((bytes) => [
      draw("line", { class: "rule", x1: left, x2: right, y1: yOf(chart, bytes), y2: yOf(chart, bytes) }),
      draw("text", { class: "soft", x: left - 8, y: yOf(chart, bytes) + 4, "text-anchor": "end" }, tick(bytes, unit)),
    ]),
    chart.run.layers.length ? draw("text", { class: "soft", x: left - 8, y: EDGES.top + PLOT + 20, "text-anchor": "end" }, "module") : "",
  ];
}

/** Each role's area on top of those before it. */
function areas(chart, columns) {
  const { run } = chart;
  const below = new Float64Array(columns.length);
  return run.roles.map((role) => {
    const upper = [], lower = [];
    columns.slice(0, -1).forEach(({ from, event }, index) => {
      const x0 = xOf(chart, from).toFixed(1), x1 = xOf(chart, columns[index + 1].from).toFixed(1);
      const low = yOf(chart, below[index]).toFixed(1);
      below[index] += run.live[role][event];
      const high = yOf(chart, below[index]).toFixed(1);
      upper.push(`${x0},${high}L${x1},${high}`);
      lower.push(`${x1},${low}L${x0},${low}`);
    });
    return draw("path", { class: "role", "data-role": role, d: `M${upper.join("L")}L${lower.reverse().join("L")}Z`, fill: roleColour(role) });
  });
}

function levelLine(chart, columns, levels, name) {
  const points = columns.slice(0, -1).map(({ from, event }, index) => {
    const y = yOf(chart, levels[event]).toFixed(1);
    return `${xOf(chart, from).toFixed(1)},${y}L${xOf(chart, columns[index + 1].from).toFixed(1)},${y}`;
  });
  return draw("path", { class: `level ${name}`, d: `M${points.join("L")}` });
}

/** Steps and phases above the areas, modules below them. */
function bands(chart, start, stop) {
  const { run } = chart;
  const steps = [];
  for (const phase of run.phases) {
    if (steps.at(-1)?.step === phase.step) steps.at(-1).stop = phase.stop;
    else if (phase.step) steps.push({ ...phase });
  }
  const shown = ({ start: first, stop: last }) => last > start && first < stop;
  return [
    ...steps.filter(shown).map((step) => band(chart, step, 3, `step ${step.step}`)),
    ...run.phases.filter(shown).map((phase) => band(chart, phase, 22, phaseName(phase), SHORT[phase.name])),
    ...moduleStretches(run, start, stop, MODULES).map((stretch) => band(chart, stretch, EDGES.top + PLOT + 6, stretch.path || "(model)")),
  ];
}

const SHORT = { setup: "setup", forward: "fwd", loss: "loss", backward: "bwd", optimizer: "opt", zero_grad: "zero", step: "step" };

/** A stretch with its name, its `short` name or nothing, whatever there is room for. */
function band(chart, { start, stop }, y, name, short) {
  const x0 = Math.max(xOf(chart, start), EDGES.left), x1 = Math.min(xOf(chart, stop), chart.width - EDGES.right);
  const names = [name, ...(short ? [short] : name.split(".").map((_, index, parts) => parts.slice(index + 1).join(".")))];
  const text = names.find((candidate) => candidate.length * 6.2 <= x1 - x0 - 6);
  return draw("g", {}, draw("title", {}, name), draw("rect", { class: "band", x: x0, y, width: Math.max(x1 - x0, 0), height: 17 }),
    text ? draw("text", { x: x0 + 4, y: y + 12 }, text) : null);
}

/** The memory of the card, where it is near. */
function cardLine(chart) {
  if (!chart.limit) return [];
  const { left, right } = sides(chart), y = yOf(chart, chart.limit);
  const isLeft = xOf(chart, summit(chart.run)) > (left + right) / 2;  // away from the peak, which may be just below
  return [
    draw("line", { class: "limit", x1: left, x2: right, y1: y, y2: y }),
    draw("text", { class: "limit", x: isLeft ? left + 6 : right - 6, y: y + 13, "text-anchor": isLeft ? "start" : "end" }, `${chart.run.card.name}: ${size(chart.limit)}`),
  ];
}

/** The stretch that the mouse is dragged over. */
function selection(chart) {
  if (!chart.wasSelecting || !chart.selected) return "";
  const [x0, x1] = chart.selected.map((x) => x - chart.svg.getBoundingClientRect().left).sort((a, b) => a - b);
  return draw("rect", { class: "selection", x: x0, y: EDGES.top, width: x1 - x0, height: PLOT });
}

/** The peak, and the moment that is looked at. */
function marks(chart) {
  const { run } = chart, top = summit(run);
  const mark = (event, kind, text) => {
    const x = xOf(chart, event + 0.5), y = yOf(chart, run.total[event]);
    const isLeft = x > (EDGES.left + chart.width) / 2;
    return draw("g", { class: kind },
      draw("line", { x1: x, x2: x, y1: kind === "cursor" ? EDGES.top : y, y2: EDGES.top + PLOT }),
      draw("circle", { cx: x, cy: y, r: 3.5 }),
      text ? draw("text", { x: x + (isLeft ? -8 : 8), y: Math.max(y - 6, EDGES.top + 10), "text-anchor": isLeft ? "end" : "start" }, text) : null);
  };
  return [mark(top, "summit", `peak ${size(run.total[top])}`), mark(chart.event, "cursor", "")];
}
