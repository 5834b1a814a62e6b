// A curve of memory by size with a slider: what each line needs at the size, between two runs along their line.

function addSlider(section) {
  const svg = section.querySelector("svg[data-frame]");
  if (!svg) return;
  const { left, right, bottom, top, events } = JSON.parse(svg.dataset.frame), axis = svg.dataset.axis;
  const limits = JSON.parse(svg.dataset.limits);
  const lines = [...svg.querySelectorAll("g[data-points]")].map((line) => ({ name: line.dataset.name, points: JSON.parse(line.dataset.points) })).reverse();
  const sizes = lines.flatMap(({ points }) => points.map(([size]) => size)).sort((a, b) => a - b);
  const answer = Number(svg.dataset.answer) || sizes.at(-1);
  const cursor = svg.appendChild(draw("line", { class: "cursor", y1: top, y2: bottom }));
  const output = make("output", { class: "remark" });
  const slider = make("input", { type: "range", min: sizes[0], max: sizes.at(-1), value: answer, "aria-label": axis, oninput: () => show() });
  const show = () => {
    const at = Number(slider.value), x = left + (right - left) * at / events;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    output.textContent = [`${axis} ${count(at)}`, ...lines.map((line) => needText(line, at, limits))].filter(Boolean).join(" · ");
  };
  svg.parentElement.after(make("div", { class: "tools" }, slider, output));
  show();
}

/** The need of a line at a size that lies between its runs, and on which of the GPUs of the picture it fits. */
function needText({ name, points }, at, limits) {
  const after = points.findIndex(([size]) => size >= at);
  if (after < 0 || at < points[0][0]) return "";
  const [high, most] = points[after], [low, least] = points[Math.max(after - 1, 0)];
  const need = high === at ? most : least + (most - least) * (at - low) / (high - low);
  const fits = limits.map(([title, bytes]) => `${need <= bytes ? "fits" : "does not fit"} on ${title}`);
  return `${name}: ${high === at ? "" : "about "}${size(need)}${fits.length ? `, ${fits.join(", ")}` : ""}`;
}
