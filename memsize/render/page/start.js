// Puts everything together: what is on the page already becomes something one can touch.

async function start() {
  document.querySelector(".memsize").prepend(pageTools());
  await touch(document.querySelector(".memsize"));
  document.querySelectorAll("section.scenes").forEach(followScenes);
  await recall();
  document.documentElement.dataset.ready = "yes";
}

const touched = [];
const charts = [];

/** Makes the tables and pictures inside `scope` touchable, and lets them point to each other. */
async function touch(scope) {
  const tables = [...scope.querySelectorAll("section.table")].map(touchable);
  touched.push(...tables);
  for (const { state } of tables) if (state.isOfModules) addTreemap(state);
  // Without a table of modules a module's name leads nowhere.
  if (touched.some(({ state }) => state.isOfModules)) for (const { state } of tables) linkPaths(state);
  for (const section of scope.querySelectorAll("section.picture")) {
    await addTimeline(section);
    addSlider(section);
  }
  linkLayers(scope);
  for (const link of scope.querySelectorAll("a.moment")) link.addEventListener("click", (event) => { event.preventDefault(); showMomentOf(link); });
}

/** Shows the row of a module, in the first table on the page that has one for it. */
function showModule(path) {
  return touched.some(({ state, reveal }) => state.isOfModules && state.table.isConnected && reveal(path));
}

/** A treemap of each column of bytes in a table of modules. */
function addTreemap(state) {
  const measures = state.columns.filter((column) => column.kind === "bytes" && column.adds).map((column) => ({
    title: column.title,
    leaves: state.rows.filter((row) => row.path !== null && row.values[column.index] > 0).map((row) => ({
      path: row.path,
      value: row.values[column.index],
      role: column.head.dataset.role ?? "parameter",
      lines: [row.row.cells[1].textContent],
    })),
  })).filter((measure) => measure.leaves.length > 1);
  if (!measures.length) return;
  const view = touchableTreemap(() => measures, (path) => reveal(state, path));
  state.section.querySelector(".tools").before(view.element);
  linkRows(state, view);
}

async function addTimeline(section) {
  const data = section.querySelector("script.timeline");
  if (!data) return;
  const run = readRun(JSON.parse(await unpacked(data)));
  const panel = momentPanel(run, showModule);
  const chart = touchableChart(run, panel.show);
  section.querySelector("svg").replaceWith(chart.element);
  section.append(panel.element);
  charts.push({ section, chart });
  chooseEvent(chart, chart.event);
}

/** The moment that a finding is about, in the run of its scenario. */
async function showMomentOf({ dataset }) {
  await followScene(dataset.scene);
  const { section, chart } = charts.find((entry) => entry.section.isConnected);
  chooseEvent(chart, Number(dataset.event));
  keepInSight(chart);
  section.scrollIntoView();
}

/** Where another table names a module, its name leads to the module's row. */
function linkPaths(state) {
  for (const cell of state.table.tBodies[0].querySelectorAll("td[data-path]")) {
    if (cell.cellIndex === 0 && state.isOfModules) continue;
    asButton(cell, () => showModule(cell.dataset.path));
  }
}

/** The modules that a finding is about lead to their rows. */
function linkLayers(scope) {
  for (const link of scope.querySelectorAll("a.layer")) {
    if (!touched.some(({ state }) => state.isOfModules)) link.removeAttribute("href");
    link.addEventListener("click", (event) => { if (showModule(link.dataset.path)) event.preventDefault(); });
  }
}

/** Makes what an element says a button. */
function asButton(element, press) {
  const button = make("button", { type: "button", class: "link", onclick: press });
  button.append(...element.childNodes);
  element.append(button);
  return button;
}

start();
