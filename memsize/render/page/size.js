// Bytes as text, just as the figures in the page's tables are drawn: in the page's unit, two decimals.

const unit = { name: document.body.dataset.unit, bytes: Number(document.body.dataset.unitBytes) };

/** `bytes` without the unit's name: `35.19`. Exactly nothing is `0`, and what is too small to show is `<0.01`. */
function amount(bytes, whole = unit.bytes) {
  if (!bytes) return "0";
  if (whole === 1) return count(bytes);
  const size = bytes / whole;
  if (size > 0 && size < 0.005) return "<0.01";
  const [before, decimals] = twoDecimals(size).split(".");
  return `${count(Number(before))}.${decimals}`;
}

/** By how much bytes grew or shrank, without the unit's name: `+1.53`. */
function changed(bytes) {
  return `${bytes > 0 ? "+" : bytes < 0 ? "−" : ""}${amount(Math.abs(bytes))}`;
}

/** Python rounds what lies just between two figures to the even one (0.125 to 0.12), `toFixed` up (to 0.13). */
function twoDecimals(number) {
  const isRoundedUp = (number * 8) % 4 === 1;
  return (isRoundedUp ? number - 0.005 : number).toFixed(2);
}

/** `bytes` with the unit's name: less than a tenth of the unit in a smaller one. */
function size(bytes) {
  const isBinary = unit.name.endsWith("iB");
  const names = isBinary ? ["B", "KiB", "MiB", "GiB", "TiB"] : ["B", "kB", "MB", "GB", "TB"];
  let { name, bytes: whole } = unit;
  while (bytes > 0 && bytes < whole / 10) {
    whole /= isBinary ? 1024 : 1000;
    name = names[Math.round(Math.log(whole) / Math.log(isBinary ? 1024 : 1000))];
  }
  return `${amount(bytes, whole)} ${name}`;
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
function ticks(most) {
  const whole = most / unit.bytes;
  if (!(whole > 0)) return [0];
  const power = 10 ** Math.floor(Math.log10(whole));
  const step = [power, power / 2, power / 5, power / 10].find((candidate) => whole / candidate >= 4);
  return Array.from({ length: Math.floor(whole / step) + 1 }, (_, index) => index * step * unit.bytes);
}
