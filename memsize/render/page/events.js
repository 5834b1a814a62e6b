// A run, event by event: what is alive after each, and where the caching allocator put it.

/** The run that a page carries: its columns as a timeline's JSON has them, and what is looked up again and again. */
function readRun(data) {
  const events = data.delta.length;
  for (const name of ["storage", "layer", "allocated", "reserved"]) data[name] = runningSum(data[name]);
  const phaseAt = new Int32Array(events);
  data.phases.forEach((phase, index) => phaseAt.fill(index, phase.start, phase.stop));
  const { role, ...columns } = data.storages;
  const storages = (role ?? []).map((name, index) => ({ role: name, layer: columns.layer[index], op: columns.op[index], dtype: columns.dtype[index], shape: columns.shape[index], lineIndex: columns.line[index], line: data.lines[columns.line[index]] ?? "" }));
  const ofRole = (wanted) => data.delta.map((change, event) => (storages[data.storage[event]].role === wanted ? change : 0));
  const live = Object.fromEntries(data.roles.map((name) => [name, runningSum(ofRole(name))]));
  return { ...data, events, phaseAt, storages, live, total: runningSum(data.delta) };
}

function runningSum(changes) {
  let sum = 0;
  return Float64Array.from(changes, (change) => (sum += change));
}

function phaseName(phase) {
  return phase.step ? `${phase.name} ${phase.step}` : phase.name;
}

function layerName(run, index) {
  return index < 0 ? null : run.layers[index] || "(model)";
}

/** Where the event happens, in words: its phase, its module, its op. */
function placeOf(run, event) {
  return [phaseName(run.phases[run.phaseAt[event]]), layerName(run, run.layer[event]), run.op[event]].filter(Boolean).join(" · ");
}

/** The storages that are alive after `event`, the largest first: `storage`, `bytes` and `address`. */
function aliveAfter(run, event) {
  const live = new Map();
  for (let at = 0; at <= event; at++) {
    const storage = run.storage[at], change = run.delta[at];
    if (!change) continue;
    const bytes = (live.get(storage)?.bytes ?? 0) + change;
    if (bytes) live.set(storage, { storage, bytes, address: run.address[at], born: at });
    else live.delete(storage);
  }
  return [...live.values()].sort((a, b) => b.bytes - a.bytes || a.storage - b.storage);
}

/** The memory that the allocator holds after `event`, as stretches by address. */
function mappedAfter(run, event) {
  const stretches = new Map();
  for (const { event: at, address, bytes } of run.segments) {
    if (at > event) break;
    if (bytes > 0) stretches.set(address, address + bytes);
    else unmap(stretches, address, address - bytes);
  }
  const sorted = [...stretches].sort(([a], [b]) => a - b);
  const joined = [];
  for (const [start, end] of sorted) {
    const last = joined.at(-1);
    if (last && last.end === start) last.end = end;
    else joined.push({ start, end });
  }
  return joined;
}

function unmap(stretches, from, to) {
  for (const [start, end] of [...stretches]) {
    if (end <= from || start >= to) continue;
    stretches.delete(start);
    if (start < from) stretches.set(start, from);
    if (end > to) stretches.set(to, end);
  }
}

/** The event after which most bytes are alive, among those from `start` up to `stop`. */
function summit(run, start = 0, stop = run.events) {
  let best = start;
  for (let event = start + 1; event < stop; event++) if (run.total[event] > run.total[best]) best = event;
  return best;
}

/** At most `columns` events that stand for those from `start` up to `stop`: of each equal stretch the highest. */
function standIns(run, start, stop, columns) {
  const step = Math.max((stop - start) / columns, 1);
  const samples = [];
  for (let edge = start; edge < stop; edge += step) {
    const first = Math.floor(edge);
    samples.push({ from: first, event: summit(run, first, Math.max(Math.min(Math.floor(edge + step), stop), first + 1)) });
  }
  return samples;
}

/** Which module runs when, as deep as `most` stretches can tell: `path`, `start`, `stop`. */
function moduleStretches(run, start, stop, most) {
  const depths = Math.max(1, ...run.layers.map((path) => (path ? path.split(".").length : 0)));
  for (let depth = depths; depth >= 0; depth--) {
    const names = run.layers.map((path) => path.split(".").slice(0, depth).join("."));
    const stretches = [];
    for (let event = start; event < stop; event++) {
      const path = run.layer[event] < 0 ? null : names[run.layer[event]];
      const last = stretches.at(-1);
      const isRelease = last && path !== null && last.path !== null && run.delta[event] < 0 && isInside(last.path, path);
      if (last && (last.path === path || isRelease)) last.stop = event + 1;
      else stretches.push({ path, start: event, stop: event + 1 });
      if (stretches.length > most && depth) break;
    }
    if (stretches.length <= most || !depth) return stretches.filter((stretch) => stretch.path !== null);
  }
  return [];
}
