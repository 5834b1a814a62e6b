// The whole run in small below its picture, once that is zoomed: what is shown of it is lit, and one can drag it.

const OVERVIEW = 30;

function overview(chart) {
  const drag = (pointer) => {
    if (!pointer.buttons) return;
    const { left } = chart.overview.getBoundingClientRect();
    d3.select(chart.svg).call(chart.zoom.translateTo, pointer.clientX - left, 0);
  };
  return draw("svg", { class: "overview", height: OVERVIEW, "aria-hidden": true, hidden: true, onpointerdown: drag, onpointermove: drag });
}

function redrawOverview(chart) {
  const { run, width, overview: svg } = chart, { left, right } = sides(chart);
  const isWhole = chart.to - chart.from > 0.999 * run.events;
  svg.toggleAttribute("hidden", isWhole);
  if (isWhole) return;
  svg.setAttribute("viewBox", `0 0 ${width} ${OVERVIEW}`);
  const x = (event) => left + (right - left) * event / run.events;
  const points = standIns(run, 0, run.events, Math.round(right - left)).map(({ from, event }) => `${x(from).toFixed(1)},${(OVERVIEW * (1 - run.total[event] / chart.most)).toFixed(1)}`);
  svg.replaceChildren(
    draw("path", { d: `M${left},${OVERVIEW}L${points.join("L")}L${right},${OVERVIEW}Z` }),
    draw("rect", { x: x(chart.from), y: 0, width: x(chart.to) - x(chart.from), height: OVERVIEW }));
}
