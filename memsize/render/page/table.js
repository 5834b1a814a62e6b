// A table that sorts, searches, folds by module and shows the columns one wants. Without scripts it is whole already.

const MANY_ROWS = 12;
const UNFOLDED_ROWS = 40;

/** Makes the table in `section` one that can be touched, and returns how other parts of the page reach its rows. */
function touchable(section) {
  const table = section.querySelector("table");
  const columns = readColumns(table);
  const rows = readRows(table);
  const state = { table, columns, rows, section, sorted: null, direction: 1, wanted: "", tree: null, isFlat: false };
  state.isOfModules = rows.some((row) => row.path !== null);
  if (rows.some((row) => row.path?.includes("."))) state.tree = moduleTree(state);
  if (rows.length > 1) columns.forEach((column) => addSorting(state, column));
  const tools = make("div", { class: "tools" });
  if (rows.length > MANY_ROWS) tools.append(searchField(state));
  if (state.tree) tools.append(...foldingButtons(state));
  if (columns.length > 4) tools.append(columnMenu(state));
  tools.append(make("button", { type: "button", onclick: (event) => copyText(tableMarkdown(state), event.target) }, "Copy table"));
  state.status = make("output", { class: "status" });
  tools.append(state.status);
  section.querySelector(".scroll").before(tools);
  if (state.tree) foldToFit(state);
  arrange(state);
  section.dataset.touched = "yes";
  return { state, reveal: (path) => reveal(state, path) };
}

/** The rows in their order, those hidden that are folded away or not searched for. */
function arrange(state) {
  const body = state.table.tBodies[0];
  const matches = state.rows.filter((row) => row.text.includes(state.wanted));
  const shown = state.tree && !state.isFlat ? unfolded(state, new Set(matches)) : inOrder(state, matches);
  const seen = new Set(shown);
  body.replaceChildren(...shown.map((entry) => entry.row));
  for (const entry of state.rows) if (!seen.has(entry)) entry.row.remove();
  state.table.classList.toggle("tree", Boolean(state.tree) && !state.isFlat);
  state.status.textContent = state.wanted ? summary(state, matches) : "";
}

function inOrder(state, entries) {
  const { sorted, direction } = state;
  const value = (entry) => entry.values[sorted];
  return [...entries].sort((a, b) => (sorted === null ? 0 : compareValues(value(a), value(b), direction)) || a.order - b.order);
}

/** What a search found, and what that adds up to. */
function summary(state, matches) {
  const sums = state.columns
    .filter((column) => column.kind === "bytes" && column.adds)
    .map((column) => [column, columnSum(matches, column.index)])
    .filter(([, sum]) => sum);
  return [`${count(matches.length)} of ${count(state.rows.length)} rows`, ...sums.map(([column, sum]) => `${column.title} ${column.isSigned ? `${changed(sum, column.unit)} ${column.unit.name}` : size(sum)}`)].join(" · ");
}

// Sorting

/** A button in the column's title: figures sort the largest first, words from A. A third press restores the order. */
function addSorting(state, column) {
  const press = () => {
    const first = column.isFigure ? -1 : 1;
    if (state.sorted !== column.index) [state.sorted, state.direction] = [column.index, first];
    else if (state.direction === first) state.direction = -first;
    else [state.sorted, state.direction] = [null, 1];
    for (const other of state.columns) other.head.setAttribute("aria-sort", "none");
    if (state.sorted !== null) column.head.setAttribute("aria-sort", state.direction < 0 ? "descending" : "ascending");
    arrange(state);
  };
  const button = make("button", { type: "button", class: "sort", onclick: press });
  button.append(...column.head.childNodes);
  column.head.append(button);
  column.head.setAttribute("aria-sort", "none");
}

// Searching

function searchField(state) {
  const search = oncePerFrame((text) => { state.wanted = text.trim().toLowerCase(); arrange(state); });
  return make("input", {
    type: "search", placeholder: "Search rows", "aria-label": "Search the rows of this table",
    oninput: (event) => search(event.target.value),
  });
}

// Folding

/** The modules around the rows: each node that has children gets a row of its own that adds them up. */
function moduleTree(state) {
  const tree = pathTree(state.rows);
  walk(tree, (node) => {
    node.isOpen = true;
    node.leaves = [...node.items];
  });
  const gather = (node) => {
    for (const child of node.children) node.leaves = node.leaves.concat(gather(child));
    return node.leaves;
  };
  gather(tree);
  walk(tree, (node) => { if (node.children.length && node.parent) node.group = groupRow(state, node); });
  walk(tree, (node) => { for (const item of node.items) nestRow(item.row, node); });
  return tree;
}

/** A row inside a module is called what its path adds to the module's; one that is a module too stands below its group. */
function nestRow(row, node) {
  const isOwn = Boolean(node.group);
  indent(row, depthOf(node) + (isOwn ? 1 : 0));
  row.classList.toggle("itself", isOwn);
  if (!node.parent) return;
  const above = node.parent.path ? `${node.parent.path}.` : "";
  row.cells[0].replaceChildren(make("span", { class: "above" }, above), node.path.slice(above.length));
}

function depthOf(node) {
  return node.parent ? depthOf(node.parent) + 1 : -1;
}

function indent(row, depth) {
  row.style.setProperty("--depth", Math.max(depth, 0));
}

/** A row for a module with others inside it. What it adds up is drawn softly: it is counted in its rows already. */
function groupRow(state, node) {
  const values = state.columns.map((column) => (column.adds ? columnSum(node.leaves, column.index) : null));
  const toggle = make("button", { type: "button", class: "fold", onclick: () => { node.isOpen = !node.isOpen; arrange(state); }, onkeydown: (event) => foldByKey(state, node, event) }, node.name);
  const cells = state.columns.map((column, index) => {
    const value = values[index];
    if (index === 0) return make("td", { class: "name", title: node.path }, toggle, make("span", { class: "within" }, ` ${count(node.leaves.length)}`));
    const text = value === null ? "" : drawnAs(column)(value);
    return make("td", { class: column.kind, "data-sum": value, title: column.kind === "bytes" && value ? `${count(value)} B in all` : null, hidden: column.head.hidden }, text);
  });
  const row = make("tr", { class: "group", "data-module": node.path }, ...cells);
  indent(row, depthOf(node));
  values[0] = node.name;
  return { row, values, order: node.leaves[0].order, toggle };
}

/** How the figures of a column are drawn. */
function drawnAs(column) {
  if (column.kind === "share") return (part) => `${(100 * part).toFixed(0)}%`;
  if (column.kind !== "bytes") return count;
  return (bytes) => (column.isSigned ? changed : amount)(bytes, column.unit);
}

function foldByKey(state, node, event) {
  const wanted = { ArrowRight: true, ArrowLeft: false }[event.key];
  if (wanted === undefined || wanted === node.isOpen) return;
  event.preventDefault();
  node.isOpen = wanted;
  arrange(state);
  node.group.toggle.focus();
}

/** The rows to show, in order: groups before what is inside them. A search opens what it finds. */
function unfolded(state, matches) {
  const shown = [];
  const isSearching = state.wanted !== "";
  const add = (node) => {
    if (isSearching && !node.leaves.some((leaf) => matches.has(leaf))) return;
    const isOpen = node.isOpen || isSearching;
    if (node.group) {
      node.group.toggle.setAttribute("aria-expanded", isOpen);
      shown.push(node.group);
    }
    if (node.group && !isOpen) return;
    shown.push(...node.items.filter((item) => matches.has(item)));
    const inside = node.children.map((child) => ({ child, ...(child.group ?? child.items[0]) }));
    for (const { child } of inOrder(state, inside)) add(child);
  };
  add(state.tree);
  return shown;
}

function foldingButtons(state) {
  const all = (isOpen) => () => {
    walk(state.tree, (node) => { node.isOpen = isOpen || !node.parent; });
    arrange(state);
  };
  const flat = make("button", { type: "button", "aria-pressed": "false", title: "One list instead of modules inside modules", onclick: () => {
    state.isFlat = !state.isFlat;
    flat.setAttribute("aria-pressed", state.isFlat);
    arrange(state);
  } }, "List");
  return [make("button", { type: "button", onclick: all(false) }, "Fold all"), make("button", { type: "button", onclick: all(true) }, "Unfold all"), flat];
}

/** Folds the deepest modules first, until the table fits about a screen. */
function foldToFit(state) {
  const groups = [];
  walk(state.tree, (node) => { if (node.group) groups.push(node); });
  const everything = new Set(state.rows);
  groups.sort((a, b) => depthOf(b) - depthOf(a));
  for (let index = 0; index < groups.length && unfolded(state, everything).length > UNFOLDED_ROWS; ) {
    const depth = depthOf(groups[index]);
    while (index < groups.length && depthOf(groups[index]) === depth) groups[index++].isOpen = false;
  }
}

/** Unfolds the row of a module, or that of the nearest around it, scrolls to it and marks it for a moment. */
function reveal(state, path) {
  let target = null;
  walk(state.tree ?? { children: [], path: null }, (node) => { if (node.path !== null && isInside(path, node.path) && (node.group || node.items.length)) target = node; });
  const entry = target ? target.group ?? target.items[0] : state.rows.find((row) => row.path === path);
  if (!entry) return false;
  for (let node = target?.parent; node; node = node.parent) node.isOpen = true;
  state.wanted = "";
  const field = state.section.querySelector("input[type=search]");
  if (field) field.value = "";
  arrange(state);
  entry.row.scrollIntoView({ block: "center" });
  for (const row of state.table.querySelectorAll("tr.found")) row.classList.remove("found");
  void entry.row.offsetWidth; // starts the animation anew
  entry.row.classList.add("found");
  return true;
}

// Rows and areas

/** The module of a row; null in a row of something else. */
function moduleOf(row) {
  return row.dataset.module ?? row.cells[0].dataset.path ?? null;
}

/** Lights the area of the row that is pointed at or has the focus; pressing its name zooms there. ↑ and ↓ move between rows. */
function linkRows(state, view) {
  const body = state.table.tBodies[0];
  const rowOf = (event) => event.target.closest("tr");
  const zoom = (event) => { const path = moduleOf(rowOf(event)); if (path !== null) view.show(path); };
  for (const kind of ["pointerover", "focusin"]) body.addEventListener(kind, (event) => view.light(moduleOf(rowOf(event))));
  for (const kind of ["pointerleave", "focusout"]) body.addEventListener(kind, () => view.light(null));
  body.addEventListener("click", (event) => { if (event.target.closest("td.name:first-child") && !event.target.closest("button")) zoom(event); });
  body.addEventListener("keydown", (event) => {
    const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (event.key === "Enter" && event.target.matches("td")) zoom(event);
    else if (next && rowOf(event)[next]) nameOf(rowOf(event)[next]).focus();
    else return;
    event.preventDefault();
  });
  for (const { row } of state.rows) row.cells[0].tabIndex = -1;
  state.rows[0].row.cells[0].tabIndex = 0;
}

/** What has the focus in a row: the button of one that folds, or its name. */
function nameOf(row) {
  return row.querySelector("button.fold") ?? row.cells[0];
}

// Columns

function columnMenu(state) {
  const box = (column) => make("label", {},
    make("input", { type: "checkbox", checked: !column.head.hidden, onchange: (event) => showColumn(state, column, event.target.checked) }), ` ${column.title}`);
  return make("details", { class: "menu" }, make("summary", {}, "Columns"), make("div", {}, ...state.columns.slice(1).map(box)));
}

function showColumn(state, column, isShown) {
  const groups = [];
  if (state.tree) walk(state.tree, (node) => { if (node.group) groups.push(node.group.row); });
  const feet = state.table.tFoot ? [...state.table.tFoot.rows] : [];
  for (const row of [...state.rows.map((entry) => entry.row), ...groups, ...feet]) row.cells[column.index].hidden = !isShown;
  column.head.hidden = !isShown;
}

// Copying

/** The table as it is shown now, as markdown: without hidden columns, with the rows that are there. */
function tableMarkdown(state) {
  const shown = state.columns.filter((column) => !column.head.hidden);
  const escape = (text) => text.trim().replace(/[\\`*_[\]<>|#~]/g, "\\$&");
  const line = (texts) => `| ${texts.join(" | ")} |`;
  const title = (column) => escape(column.kind === "bytes" ? `${column.title}, ${column.unit.name}` : column.title);
  const cells = (row) => line(shown.map((column) => escape(row.cells[column.index].textContent)));
  const leaves = [...state.table.tBodies[0].rows].filter((row) => !row.classList.contains("group"));
  return [
    line(shown.map(title)),
    line(shown.map((column) => (column.isFigure ? "---:" : ":---"))),
    ...leaves.map(cells),
    ...(state.table.tFoot ? [cells(state.table.tFoot.rows[0])] : []),
  ].join("\n") + "\n";
}
