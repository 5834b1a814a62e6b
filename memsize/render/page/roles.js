// What a byte is for: the colour and the name of each role, the same everywhere.

const roles = JSON.parse(document.body.dataset.roles);

function roleColour(role) {
  return `var(--${role.replaceAll(" ", "-")})`;
}

/** What the bytes of a role are called together. */
function roleNoun(role) {
  return roles[role].noun;
}

/** Whether dark or light letters are easier to read on a role's colour: its relative luminance, as WCAG defines it. */
function roleInk(role) {
  const [red, green, blue] = [1, 3, 5]
    .map((start) => parseInt(roles[role].colour.slice(start, start + 2), 16) / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.19 ? "on-light" : "on-dark";
}

function swatch(role) {
  return make("i", { style: `background:${roleColour(role)}` });
}
