// Puts everything together: what is on the page already becomes something one can touch.

async function start() {
  document.querySelector(".memsize").prepend(pageTools());
  await touch(document.querySelector(".memsize"));
  document.documentElement.dataset.ready = "yes";
}

/** Makes the tables and pictures inside `scope` touchable, and lets them point to each other. */
async function touch(scope) {
  const tables = [...scope.querySelectorAll("section.table")].map((section) => touchable(section));
  const toRow = (path) => tables.some((table) => table.state.tree !== null && table.reveal(path));
  for (const { state } of tables) if (state.tree) addTreemap(state);
  for (const { state } of tables) linkPaths(state, toRow);
  for (const section of scope.querySelectorAll("section.picture")) await addTimeline(section, toRow);
}

/** A treemap of each column of bytes in a table of modules. */
function addTreemap(state) {
  const measures = state.columns.filter((column) => column.kind === "bytes" && column.adds).map((column) => ({
    title: column.title,
    leaves: state.rows.filter((row) => row.path !== null && row.values[column.place] > 0).map((row) => ({
      path: row.path,
      value: row.values[column.place],
      role: column.head.dataset.role ?? "parameter",
      lines: [row.row.cells[1].textContent],
    })),
  })).filter((measure) => measure.leaves.length > 0);
  if (!measures.length) return;
  const view = touchableTreemap(() => measures, (path) => reveal(state, path));
  state.section.querySelector(".tools").before(view.element);
}

async function addTimeline(section, toRow) {
  const data = section.querySelector("script.timeline");
  if (!data) return;
  const run = readRun(JSON.parse(await unpacked(data)));
  const panel = momentPanel(run, toRow);
  const chart = touchableChart(run, panel.show);
  section.querySelector("svg").replaceWith(chart.element);
  section.append(panel.element);
  chooseEvent(chart, chart.event);
}

/** Where another table names a module, its name leads to the module's row. */
function linkPaths(state, toRow) {
  for (const cell of state.table.tBodies[0].querySelectorAll("td[data-path]")) {
    if (cell.cellIndex === 0 && state.tree) continue;
    const path = cell.dataset.path;
    cell.addEventListener("click", () => toRow(path));
  }
}

start();
