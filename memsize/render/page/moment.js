// What is alive at one moment of a run: by role, by module, tensor by tensor, and where the allocator put it.

const LISTED = 14;
const BLOCK_ROWS = 12;
const ROW_HEIGHT = 17;

/** The panel below a run's picture; `choose` is told the module that is pressed in it. */
function momentPanel(run, choose) {
  const panel = { run, choose, element: make("section", { class: "moment", "aria-label": "What is alive at the chosen moment" }) };
  panel.head = make("h3", { "aria-live": "polite" });
  panel.facts = make("p", { class: "facts" });
  panel.roles = make("div", { class: "roles" });
  panel.list = make("div", { class: "scroll" });
  panel.treemap = touchableTreemap(() => [{ title: "Alive", leaves: panel.leaves ?? [] }], choose);
  panel.calls = touchableTreemap(() => [{ title: "Alive", leaves: panel.stacks ?? [] }], () => {}, "icicle", "(program)");
  panel.blocks = make("div", { class: "blocks" });
  const parts = { Tensors: panel.list };
  if (run.layers.length) parts.Modules = panel.treemap.element;
  if (run.lines.length) parts["Lines and calls"] = panel.calls.element;
  if (run.segments.length) parts["Allocator’s segments"] = panel.blocks;
  panel.element.append(panel.head, panel.facts, panel.roles, partButtons(parts), ...Object.values(parts));
  panel.show = (event) => showMoment(panel, event);
  return panel;
}

/** Buttons that show one of `parts` at a time. */
function partButtons(parts) {
  const names = Object.keys(parts);
  const show = (chosen) => names.forEach((name) => { parts[name].hidden = name !== chosen; });
  show(names[0]);
  return make("div", { class: "tools" }, make("span", { class: "choice", role: "group", "aria-label": "What is shown of this moment" },
    ...names.map((name, index) => make("button", { type: "button", "aria-pressed": index === 0, onclick: (event) => { show(name); press(event.target); } }, name))));
}

function showMoment(panel, event) {
  const { run } = panel;
  const alive = aliveAfter(run, event);
  panel.head.textContent = `After event ${count(event)}: ${placeOf(run, event)}`;
  panel.facts.replaceChildren(...[`live ${size(run.total[event])}`, `allocated ${size(run.allocated[event])}`, `reserved ${size(run.reserved[event])}`].map((text) => make("span", {}, text)));
  panel.roles.replaceChildren(...roleBar(run, event));
  panel.list.replaceChildren(storageTable(panel, alive));
  panel.leaves = aliveLeaves(run, alive);
  panel.treemap.update();
  panel.stacks = stackLeaves(run, alive);
  panel.calls.update();
  panel.blocks.replaceChildren(...blockMap(run, event, alive));
}

/** A bar whose parts are roles, and each role's name and bytes. */
function roleBar(run, event) {
  const parts = run.roles.filter((role) => run.live[role][event] > 0);
  return [
    make("div", { class: "bar", "aria-hidden": "true" }, ...parts.map((role) => make("i", { style: `background:${roleColour(role)};flex-grow:${run.live[role][event]}` }))),
    make("ul", { class: "keys" }, ...parts.map((role) => make("li", { "data-role": role, "data-value": run.live[role][event] }, swatch(role), `${roleNoun(role)} ${size(run.live[role][event])}`))),
  ];
}

function tensorText(storage) {
  return storage.dtype ? `${storage.dtype}[${storage.shape.join(",")}]` : "";
}

/** The largest storages, and what the others hold together. */
function storageTable(panel, alive) {
  const { run } = panel;
  const unit = unitFor(Math.max(0, ...alive.map((entry) => entry.bytes)));
  const rows = alive.slice(0, panel.isWhole ? alive.length : LISTED).map((entry) => storageRow(panel, entry, unit));
  const rest = alive.slice(rows.length);
  const more = rest.length
    ? make("button", { type: "button", onclick: () => { panel.isWhole = true; panel.list.replaceChildren(storageTable(panel, alive)); } },
      `and ${count(rest.length)} more, ${size(rest.reduce((sum, entry) => sum + entry.bytes, 0))}`)
    : null;
  const heads = [["number", `bytes`], ["text", "role"], ...(run.layers.length ? [["text", "tensor"], ["text", "made by"], ["text", "in"]] : [["text", "made by"]]), ["text", "during"], ...(run.lines.length ? [["text", "line"]] : [])];
  return make("div", {}, make("table", { class: "living" },
    make("thead", {}, make("tr", {}, ...heads.map(([side, title]) => make("th", { class: side, scope: "col" }, title, title === "bytes" ? make("small", {}, unit.name) : null)))),
    make("tbody", {}, ...rows)), more);
}

function storageRow(panel, { storage: index, bytes, born }, unit) {
  const { run } = panel, storage = run.storages[index], path = storage.layer < 0 ? null : run.layers[storage.layer];
  const module = path === null ? "" : make("button", { type: "button", class: "link", onclick: () => panel.choose(path) }, path || "(model)");
  return make("tr", { "data-storage": index },
    make("td", { class: "bytes", "data-value": bytes, title: `${count(bytes)} B` }, amount(bytes, unit)),
    make("td", {}, swatch(storage.role), ` ${roleNoun(storage.role)}`), run.layers.length ? make("td", { class: "name" }, tensorText(storage)) : null,
    make("td", {}, storage.op), run.layers.length ? make("td", { class: "name" }, module) : null, make("td", { class: "text" }, phaseName(run.phases[run.phaseAt[born]])),
    run.lines.length ? make("td", { class: "name" }, storage.line) : null);
}

/** The bytes alive, module by module and role by role; what belongs to no module stands beside them. */
function aliveLeaves(run, alive) {
  const sums = new Map();
  for (const { storage: index, bytes } of alive) {
    const storage = run.storages[index], path = storage.layer < 0 ? "(outside the model)" : run.layers[storage.layer];
    const key = `${storage.role} ${path}`;
    const leaf = sums.get(key) ?? { path, role: storage.role, value: 0, tensors: 0 };
    leaf.value += bytes;
    leaf.tensors += 1;
    sums.set(key, leaf);
  }
  return [...sums.values()].map((leaf) => ({ ...leaf, lines: [`${leaf.tensors} × ${roleNoun(leaf.role)}`] }));
}

/** The bytes alive by the calls that made them, outermost first: the lines, then the module and the op. */
function stackLeaves(run, alive) {
  const sums = new Map();
  for (const { storage: index, bytes } of alive) {
    const storage = run.storages[index];
    const calls = run.stacks[storage.lineIndex]?.length ? run.stacks[storage.lineIndex] : storage.line ? storage.line.split(" > ") : [(!run.layers.length && storage.op) || "(no line recorded)"];
    const names = [...calls, ...(run.layers.length ? [layerName(run, storage.layer), storage.op].filter(Boolean) : [])];
    const key = JSON.stringify([names, storage.role]);
    const leaf = sums.get(key) ?? { names, path: names.join(CALLS), role: storage.role, value: 0, tensors: 0 };
    leaf.value += bytes;
    leaf.tensors += 1;
    sums.set(key, leaf);
  }
  return [...sums.values()].map((leaf) => ({ ...leaf, lines: [`${leaf.tensors} × ${roleNoun(leaf.role)}`] }));
}

/** The allocator's memory as lines of blocks, free stretches between them: one can see how it is broken up. */
function blockMap(run, event, alive) {
  const stretches = mappedAfter(run, event);
  const whole = stretches.reduce((sum, { start, end }) => sum + end - start, 0);
  if (!whole) return [make("p", { class: "remark" }, "The allocator holds nothing yet.")];
  const width = 1200, perRow = whole / BLOCK_ROWS, scale = width / perRow;
  const blocks = [...alive].sort((a, b) => a.address - b.address);
  const picture = draw("svg", { viewBox: `0 0 ${width} ${BLOCK_ROWS * ROW_HEIGHT}`, role: "img", class: "map" });
  let offset = 0, next = 0, largestFree = 0;
  for (const { start, end } of stretches) {
    rectangles(offset, offset + end - start, perRow, scale).forEach((box) => picture.append(draw("rect", { class: "free", ...box })));
    let position = start;
    while (next < blocks.length && blocks[next].address < end) {
      const block = blocks[next++], stop = Math.min(block.address + block.bytes, end);
      largestFree = Math.max(largestFree, block.address - position);
      position = stop;
      addBlock(picture, run, block, rectangles(offset + block.address - start, offset + stop - start, perRow, scale));
    }
    largestFree = Math.max(largestFree, end - position);
    offset += end - start;
  }
  const free = whole - run.allocated[event];
  const text = `${size(whole)} in ${count(stretches.length)} segments · ${size(free)} of it free (${share(free, whole)}) · the largest free stretch is ${size(largestFree)}`;
  picture.setAttribute("aria-label", text);
  return [make("p", { class: "facts" }, text), picture];
}

function addBlock(picture, run, block, boxes) {
  const storage = run.storages[block.storage];
  const lines = [`${size(block.bytes)} · ${storage.role}`, tensorText(storage), [storage.op, layerName(run, storage.layer), storage.line].filter(Boolean).join(" · ")].filter(Boolean);
  for (const box of boxes) {
    if (box.width < 0.25) continue;
    picture.append(draw("rect", { class: "block", ...box, fill: roleColour(storage.role), onpointermove: (event) => hint.show(lines, event.clientX, event.clientY), onpointerleave: () => hint.hide() }));
  }
}

/** The bytes from `start` to `end` of all that is mapped, as boxes on the lines that they fall on. */
function rectangles(start, end, perRow, scale) {
  const boxes = [];
  for (let row = Math.floor(start / perRow); row * perRow < end && row < BLOCK_ROWS; row++) {
    const from = Math.max(start, row * perRow), to = Math.min(end, (row + 1) * perRow);
    boxes.push({ x: (from - row * perRow) * scale, y: row * ROW_HEIGHT, width: (to - from) * scale, height: ROW_HEIGHT - 3 });
  }
  return boxes;
}
