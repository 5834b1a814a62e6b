// Elements made, and found again.

/** An element of HTML with attributes and children; a function among the attributes listens: `onclick`. */
function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for a part of an SVG picture. */
function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-")) element.setAttribute(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Calls `draw` once per frame at most, however often it is asked to, with what it was asked last. */
function oncePerFrame(run) {
  let waiting = null;
  return (...latest) => {
    if (waiting === null) requestAnimationFrame(() => { const last = waiting; waiting = null; run(...last); });
    waiting = latest;
  };
}

/** A small text that follows the pointer, or stands beside what has the focus. It holds lines of text. */
const hint = {
  element: null,
  show(lines, x, y) {
    this.element ??= document.querySelector(".memsize").appendChild(make("div", { class: "hint", role: "status" }));
    this.element.replaceChildren(...lines.map((line) => make("div", {}, line)));
    this.element.hidden = false;
    const { width, height } = this.element.getBoundingClientRect();
    const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
    this.element.style.left = `${Math.max(4, left)}px`;
    this.element.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - height - 4))}px`;
  },
  hide() {
    if (this.element) this.element.hidden = true;
  },
};

/** Copies `text`, and says on `button` whether that worked. */
async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    const area = document.body.appendChild(make("textarea", { class: "aside" }, text));
    area.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Could not copy";
    area.remove();
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}
