// What the page as a whole offers: its theme, and itself as markdown.

/** Buttons in the page's head. The theme is the system's until another one is chosen. */
function pageTools() {
  const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark"
    || (document.documentElement.dataset.theme === undefined && matchMedia("(prefers-color-scheme: dark)").matches);
  const theme = make("button", { type: "button", title: "Switch between light and dark", onclick: () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  } }, "Light or dark");
  const copy = make("button", { type: "button", onclick: async (event) => {
    copyText(await unpacked(document.getElementById("markdown")), event.target);
  } }, "Copy as markdown");
  return make("div", { class: "tools page-tools" }, theme, copy);
}
