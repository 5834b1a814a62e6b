// The rows of a table as values: what they are called, what they add up to, and how they are put in order.

/** What the cell sorts by: its exact figure, its words, or nothing where it is empty or not known. */
function cellValue(cell) {
  if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
  const text = cell.textContent;
  return text === "" || text === "–" ? null : text;
}

/**
 * The columns of a table: `key`, `kind`, `title`, the `unit` of their bytes, whether they are figures, say by how much something
 * changed, and add up. */
function readColumns(table) {
  return [...table.tHead.rows[0].cells].map((head, index) => ({
    index,
    head,
    key: head.dataset.key,
    kind: head.dataset.kind,
    title: head.firstChild.textContent.trim(),
    unit: head.dataset.unit ? { ...unitFor(0, head.dataset.unit), isRounded: document.body.dataset.unit === "auto" } : null,
    isFigure: ["bytes", "count", "share"].includes(head.dataset.kind),
    isSigned: [...table.tBodies[0].rows].some((row) => /^[+−]/.test(row.cells[index].textContent)),
    adds: Boolean(table.tFoot?.rows[0].cells[index].dataset.value),
  }));
}

/** The rows of a table: their `path` (none in a table of other things), `values`, and what a search looks at. */
function readRows(table) {
  return [...table.tBodies[0].rows].map((row, order) => ({
    row,
    order,
    path: row.cells[0].dataset.path ?? null,
    values: [...row.cells].map(cellValue),
    text: row.textContent.toLowerCase(),
  }));
}

/** How two values of a column compare: unknown ones come last whichever way the column is sorted. */
function compareValues(a, b, direction) {
  if (a === b) return 0;
  if (a === null) return 1;
  if (b === null) return -1;
  if (typeof a === "number" && typeof b === "number") return direction * (a - b);
  return direction * String(a).localeCompare(String(b), "en", { numeric: true });
}

/** The sum of a column over `rows`; null where none has a figure. */
function columnSum(rows, index) {
  let sum = null;
  for (const row of rows) {
    if (typeof row.values[index] === "number") sum = (sum ?? 0) + row.values[index];
  }
  return sum;
}
