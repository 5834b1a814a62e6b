// Bytes as text, just as the figures in the page's tables are drawn: in the page's unit, or in the one that suits them.

const UNITS = { B: 1, KiB: 1024, MiB: 1024 ** 2, GiB: 1024 ** 3, TiB: 1024 ** 4, kB: 1e3, KB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };

/** The unit called `name`, or with "auto" the one that suits sizes up to `most`: `name`, `bytes`, and whether it is `rounded`. */
function unitFor(most, name = document.body.dataset.unit) {
  if (name !== "auto") return { name, bytes: UNITS[name], isRounded: false };
  const suited = most >= UNITS.GiB ? "GiB" : withTenth(most, "MiB");
  return { name: suited, bytes: UNITS[suited], isRounded: true };
}

/** The unit called `name`, or the largest smaller one that `bytes`, if there are any, have a tenth of. */
function withTenth(bytes, name) {
  const isBinary = name.endsWith("iB");
  const smaller = isBinary ? ["TiB", "GiB", "MiB", "KiB", "B"] : ["TB", "GB", "MB", "kB", "B"];
  let unit = name === "KB" ? "kB" : name;
  while (bytes > 0 && bytes < UNITS[unit] / 10) unit = smaller[smaller.indexOf(unit) + 1];
  return unit;
}

/** `bytes` in `unit`, without its name: two decimals, or three significant digits of rounded GiB. Exactly nothing is `0`, and
 * what would look like it has a smaller unit, which it names. */
function amount(bytes, unit) {
  if (!bytes) return "0";
  const number = bytes / unit.bytes, isGiB = unit.isRounded && unit.name === "GiB";
  if (unit.bytes === 1 || isGiB && number >= 99.95) return count(evenlyRounded(number, 0));
  const decimals = isGiB && number >= 9.995 ? 1 : 2;
  const [before, after] = evenlyRounded(number, decimals).split(".");
  if (unit.isRounded && !Number(before) && !Number(after)) return size(bytes);
  return `${count(Number(before))}.${after}`;
}

/** A round amount without decimals that say nothing: `700`, `0.5`. */
function tick(bytes, unit) {
  return amount(bytes, unit).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/** By how much bytes grew or shrank, without the unit's name: `+1.53`. */
function changed(bytes, unit) {
  return `${bytes > 0 ? "+" : bytes < 0 ? "−" : ""}${amount(Math.abs(bytes), unit)}`;
}

/** Python rounds what lies just between two figures to the even one (0.125 to 0.12), `toFixed` up (to 0.13). */
function evenlyRounded(number, decimals) {
  const text = number.toFixed(decimals), step = 10 ** -decimals;
  const isTie = (number * 2 ** (decimals + 1)) % 1 === 0 && Number(`${number}e${decimals}`) % 1 === 0.5;
  return isTie && Number(text.at(-1)) % 2 ? (number - step / 2).toFixed(decimals) : text;
}

/** `bytes` with the name of the unit that suits them, or of the page's: less than a tenth of it in a smaller one. */
function size(bytes) {
  const { unit: name } = document.body.dataset;
  const unit = unitFor(bytes, name === "auto" ? name : withTenth(bytes, name));
  return `${amount(bytes, unit)} ${unit.name}`;
}

// `toLocaleString` makes such a format anew for each figure, which takes longer than all else on a page of many layers.
const counts = new Intl.NumberFormat("en-US");

function count(number) {
  return counts.format(number);
}

function share(part, whole) {
  return whole ? `${(100 * part / whole).toFixed(part && part < whole / 100 ? 2 : 0)} %` : "";
}

/** Four to nine round sizes from nothing to `most` bytes. */
function ticks(most, unit) {
  const whole = most / unit.bytes;
  if (!(whole > 0)) return [0];
  const power = 10 ** Math.floor(Math.log10(whole));
  const step = [power, power / 2, power / 5, power / 10].find((candidate) => whole / candidate >= 4);
  return Array.from({ length: Math.floor(whole / step) + 1 }, (_, index) => index * step * unit.bytes);
}
