// Formulas in TeX, shown as MathML. The library is loaded with the first one.

import { el } from "./dom.js";

const KEPT = 500;
const shown = new Map(); // elements by formula: a paragraph that grows is built anew for each piece of text
let library = null;

/** Element of a formula: its source until the library is there, and if that cannot read it. */
export function formula(tex, display) {
  const key = `${display} ${tex}`;
  const node = shown.get(key)?.cloneNode(true) ?? el("span", { className: "formula", title: tex }, tex);
  if (!shown.has(key)) {
    library ??= import("./vendor/temml.js");
    library.then(({ default: temml }) => render(temml, key, tex, display, node), () => (library = null));
  }
  return node;
}

function render(temml, key, tex, display, node) {
  try {
    const made = document.createElement("span");
    temml.render(tex, made, { displayMode: display, throwOnError: true, annotate: true, maxExpand: 1000 });
    node.replaceChildren(...made.childNodes);
  } catch (error) {
    node.title = error.message;
    node.classList.add("unread");
  }
  if (shown.size >= KEPT) shown.delete(shown.keys().next().value);
  shown.set(key, node.cloneNode(true));
}
