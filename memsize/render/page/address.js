// The scenario and the moment that are shown, in the page's address: a link leads to them.

/** Writes what is shown into the address. Another scenario has moments of its own. */
function remember(name, value) {
  if (!document.documentElement.dataset.ready) return;
  const state = new URLSearchParams(location.hash.includes("=") && name !== "scenario" ? location.hash.slice(1) : "");
  state.set(name, value);
  try {
    history.replaceState(null, "", `#${state}`);
  } catch {
    // The frame of a notebook has no address of its own.
  }
}

/** Shows what the address names. */
async function recall() {
  const state = new URLSearchParams(location.hash.slice(1)), event = Number(state.get("event"));
  if (state.has("scenario")) await followScene(state.get("scenario"));
  const chart = charts.find(({ section }) => section.isConnected)?.chart;
  if (!chart || !state.has("event") || !(event >= 0 && event < chart.run.events)) return;
  chooseEvent(chart, event);
  keepInSight(chart);
}
