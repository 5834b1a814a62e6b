// Bytes by module as nested areas: a treemap, or an icicle whose columns are levels of the model.

const LEAST_SIDE = 3;
const HEAD = 17;

/**
 * A picture of `measures()`, each with a `title` and `leaves`: a `path`, a `value` in bytes, a `role`, and `lines` that say
 * more. A module is zoomed into where it is pressed; `choose` is told its path. `root` names the whole.
 */
function touchableTreemap(measures, choose, kind = "treemap", root = "(model)") {
  const view = { measures, index: 0, path: "", kind, root, choose, width: 0, lit: null, shown: null };
  view.trail = make("nav", { class: "trail", "aria-label": "Module shown" });
  view.svg = draw("svg", { role: "group", class: "areas" });
  view.svg.addEventListener("pointerleave", () => hint.hide());
  view.measureButtons = make("span", { class: "choice", role: "group", "aria-label": "What areas stand for" });
  const kinds = make("span", { class: "choice", role: "group", "aria-label": "Kind of picture" },
    ...["treemap", "icicle"].map((kind) => make("button", { type: "button", "aria-pressed": kind === view.kind, onclick: (event) => {
      view.kind = kind;
      press(event.target);
      redraw(view);
    } }, kind[0].toUpperCase() + kind.slice(1))));
  view.element = make("div", { class: "treemap" }, make("div", { class: "tools" }, view.measureButtons, kinds, view.trail), view.svg);
  view.update = () => { refresh(view); };
  view.light = (path) => { view.lit = path; light(view); };
  view.show = (path) => showArea(view, path);
  new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - view.width) < 1) return;
    view.width = entry.contentRect.width;
    redraw(view);
  }).observe(view.element);
  refresh(view);
  return view;
}

/** Marks one button of its group as the one that is chosen. */
function press(button) {
  for (const other of button.parentElement.children) other.setAttribute("aria-pressed", other === button);
}

/** Looks at the measures anew, as when another moment is chosen. */
function refresh(view) {
  view.measured = view.measures();
  view.index = Math.min(view.index, view.measured.length - 1);
  view.measureButtons.replaceChildren(...(view.measured.length < 2 ? [] : view.measured.map((measure, index) =>
    make("button", { type: "button", "aria-pressed": index === view.index, onclick: (event) => {
      view.index = index;
      press(event.target);
      redraw(view);
    } }, measure.title))));
  redraw(view);
}

function redraw(view) {
  const measure = view.measured[view.index];
  view.svg.replaceChildren();
  if (!view.width || !measure) return;
  const whole = layoutTree(measure, view.root);
  let node = whole.find((node) => node.data.path === view.path && node.children) ?? whole;
  if (node === whole) view.path = "";
  drawTrail(view, node, whole);
  const height = Math.round(Math.min(440, Math.max(240, view.width * 0.45)));
  view.svg.setAttribute("viewBox", `0 0 ${view.width} ${height}`);
  view.svg.setAttribute("aria-label", `${measure.title} by ${view.root === "(model)" ? "module" : "line"}: ${size(node.value)}`);
  const shown = node.copy();
  if (view.kind === "treemap") layTreemap(shown, view.width, height);
  else layIcicle(shown, view.width, height);
  // Parents before children, so that these are drawn on top of them.
  for (const node of shown) {
    if (node !== shown && node.x1 - node.x0 >= LEAST_SIDE && node.y1 - node.y0 >= LEAST_SIDE) view.svg.append(area(view, node, shown.value));
  }
  light(view);
}

/** Marks the area of the module that is pointed at elsewhere, or else was chosen there; or the smallest one around it. */
function light(view) {
  for (const area of view.svg.querySelectorAll(".lit")) area.classList.remove("lit");
  const path = view.lit ?? view.shown;
  if (path === null) return;
  const around = [...view.svg.children].filter((area) => isInside(path, area.dataset.path));
  around.sort((a, b) => b.dataset.path.length - a.dataset.path.length)[0]?.classList.add("lit");
}

/** Zooms into the module around that of `path`, so that its area stands beside others, and lights it. */
function showArea(view, path) {
  const around = path.split(".").slice(0, -1).map((_, index, parts) => parts.slice(0, index + 1).join("."));
  const modules = new Set([...layoutTree(view.measured[view.index], view.root)].filter((node) => node.children).map((node) => node.data.path));
  view.path = around.reverse().find((name) => modules.has(name)) ?? "";
  view.shown = path;
  redraw(view);
  view.element.scrollIntoView({ block: "nearest" });
}

/** The tree of what is measured: modules, and in them a leaf for each colour of bytes that they hold themselves. */
function layoutTree(measure, root) {
  const branch = (node) => ({
    path: node.path,
    name: node.name,
    children: [
      ...node.items.map((item) => ({ path: node.path, name: node.name || root, item })),
      ...node.children.map(branch),
    ],
  });
  // A module with nothing inside but one leaf of its own is that leaf.
  const simple = (data) => {
    if (!data.children) return data;
    const children = data.children.map(simple);
    return children.length === 1 && children[0].item ? { ...children[0], name: data.name || children[0].name } : { ...data, children: alike(children) };
  };
  const tree = branch(pathTree(measure.leaves.filter((leaf) => leaf.value > 0)));
  return d3.hierarchy({ ...tree, children: tree.children.map(simple) })
    .sum((data) => data.item?.value ?? 0)
    .sort((a, b) => b.value - a.value);
}

/** Modules of a list that hold the same are one, the sum of all: `32 × 0–31`. */
function alike(children) {
  const [number, rest] = [/^\d+/, (name) => name.replace(/^\d+/, "")];
  const content = ({ name, item, children: inner }, isOuter) => JSON.stringify([isOuter ? rest(name) : name, item?.value, item?.role, inner?.map((node) => content(node))]);
  const times = (node, factor) => ({ ...node, item: node.item && { ...node.item, value: node.item.value * factor }, children: node.children?.map((inner) => times(inner, factor)) });
  const joint = (group, [first] = group, last = group.at(-1)) => ({ ...times(first, group.length), name: `${group.length} × ${first.name.match(number)}–${last.name.match(number)}${rest(first.name)}` });
  const groups = Map.groupBy(children, (node) => (number.test(node.name) ? content(node, true) : node));
  return [...groups.values()].flatMap((group) => (group.length < 3 ? group : [joint(group)]));
}

function layTreemap(shown, width, height) {
  d3.treemap().size([width, height]).round(true).paddingInner(1)
    .paddingOuter((node) => (node.depth && isRoomy(node) ? 2 : 0))
    .paddingTop((node) => (node.depth && isRoomy(node) ? HEAD : 0))(shown);
}

/** Whether a module's name has room above what is in it. */
function isRoomy(node) {
  return node.x1 - node.x0 > 44 && node.y1 - node.y0 > 34;
}

function layIcicle(shown, width, height) {
  const levels = shown.height + 1;
  d3.partition().size([height, width * levels / Math.max(levels - 1, 1)]).padding(1)(shown);
  const first = shown.y1;
  // A partition grows downwards; an icicle with names to read grows to the right, its root left out.
  for (const node of shown) [node.x0, node.x1, node.y0, node.y1] = [node.y0 - first, node.y1 - first, node.x0, node.x1];
}

function area(view, node, whole) {
  const { data, x0, x1, y0, y1 } = node;
  const isModule = Boolean(node.children);
  const lines = [data.path || view.root, `${size(node.value)} · ${share(node.value, whole)} of what is shown`, ...(data.item?.lines ?? [])];
  const text = fittingText(data.name, x1 - x0 - 8), texts = [];
  if (text && y1 - y0 >= 14) texts.push(draw("text", { x: x0 + 4, y: y0 + Math.min(13, (y1 - y0) / 2 + 4) }, `${text} `));
  if (!isModule && text && y1 - y0 >= 32 && x1 - x0 > 62) texts.push(draw("text", { x: x0 + 4, y: y0 + 27, class: "figure" }, size(node.value)));
  const enter = () => { hint.hide(); isModule ? zoomInto(view, data.path) : view.choose(data.path); };
  const group = draw("g", {
    class: isModule ? "module" : `leaf ${roleInk(data.item.role)}`, tabindex: 0, role: "button", "aria-label": [texts.map(({ textContent }) => textContent).join(""), ...lines].join(", "), "data-path": data.path,
    "data-value": node.value,
    onclick: enter,
    onkeydown: (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); enter(); }
      if (event.key === "Escape" || event.key === "Backspace") { event.preventDefault(); zoomOut(view); }
    },
    onpointermove: (event) => hint.show(lines, event.clientX, event.clientY),
    onfocus: (event) => {
      if (!event.target.matches(":focus-visible")) return;
      const box = event.target.getBoundingClientRect();
      hint.show(lines, box.left, box.top);
    },
    onblur: () => hint.hide(),
  });
  group.append(draw("rect", { x: x0, y: y0, width: x1 - x0, height: y1 - y0, fill: data.item ? roleColour(data.item.role) : null }), ...texts);
  return group;
}

/** As much of a name as there is room for; of a path its end, which tells layers apart. */
function fittingText(text, room) {
  const letters = Math.floor(room / 6.2);
  if (text.length <= letters) return text;
  if (letters < 4) return "";
  return text.includes(".") ? `…${text.slice(1 - letters)}` : `${text.slice(0, letters - 1)}…`;
}

function zoomInto(view, path) {
  view.path = path;
  redraw(view);
  view.choose(path);
  view.trail.querySelector("button:last-of-type")?.focus();
}

function zoomOut(view) {
  const above = view.trail.querySelectorAll("button");
  if (above.length) above[above.length - 1].click();
}

/** The way from the model to the module that is shown; each step goes back there. */
function drawTrail(view, node, whole) {
  const way = whole.path(node);
  const steps = way.map((node, index) => {
    const name = node.data.name || view.root;
    if (index === way.length - 1) return make("b", {}, `${name} `, make("span", {}, size(node.value)));
    return make("button", { type: "button", onclick: () => { view.path = node.data.path; redraw(view); view.choose(node.data.path); } }, name);
  });
  view.trail.replaceChildren(...steps);
}
