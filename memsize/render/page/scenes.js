// What the page shows of one scenario, and another one in its place.

/** Shows the scenario of this name, if the page has it. */
let followScene = async () => {};

/** Buttons for the scenarios of a page; wherever else it names one, that leads there too. */
function followScenes(section) {
  const shown = section.querySelector("div.scene");
  const scenes = new Map([[shown.dataset.name, shown]]);
  const packed = new Map([...section.querySelectorAll("script.scene")].map((script) => [script.dataset.name, script]));
  if (!packed.size) return;
  const names = [shown.dataset.name, ...packed.keys()];
  const follow = async (name) => {
    if (!scenes.has(name)) scenes.set(name, await unfoldedScene(packed.get(name)));
    const next = scenes.get(name);
    section.querySelector("div.scene").replaceWith(next);
    remember("scenario", name);
    if (!next.dataset.touched) await touch(next);
    next.dataset.touched = "yes";
    mark(name);
  };
  followScene = async (name) => { if (names.includes(name)) await follow(name); };
  shown.dataset.touched = "yes";
  const button = (name) => make("button", { type: "button", "data-scene": name, title: packed.get(name)?.dataset.hint, "aria-pressed": name === shown.dataset.name, onclick: () => follow(name) }, name);
  section.prepend(make("div", { class: "tools" }, make("span", { class: "choice", role: "group", "aria-label": "Scenario shown below" }, ...names.map(button))));
  for (const element of document.querySelectorAll("[data-label]")) {
    const name = element.dataset.label;
    if (!names.includes(name)) continue;
    const link = asButton(element, () => { follow(name); section.scrollIntoView(); });
    link.dataset.scene = name;
    const bar = element.closest(".bars tr");
    if (bar && !bar.dataset.scene) {
      bar.dataset.scene = name;
      bar.lastElementChild.previousElementSibling.addEventListener("click", () => follow(name));
    }
  }
  mark(shown.dataset.name);
}

/** Shows wherever a scenario can be chosen which one is. */
function mark(name) {
  for (const button of document.querySelectorAll("button[data-scene]")) button.setAttribute("aria-pressed", button.dataset.scene === name);
  for (const bar of document.querySelectorAll(".bars tr")) bar.classList.toggle("chosen", bar.querySelector(`[data-label="${CSS.escape(name)}"]`) !== null);
}

async function unfoldedScene(script) {
  const scene = make("div", { class: "scene", "data-name": script.dataset.name });
  scene.innerHTML = await unpacked(script);
  return scene;
}
