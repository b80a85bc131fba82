// List of conversations: search, rename, delete, export.

import { el, iconButton } from "./dom.js";

const SEARCH_MS = 150;
const DAY = 86_400_000;

export class Sidebar {
  /** List in `node`; `open`, `rename(id, title)`, `remove`, `exportOne`, `exportText` and `search(text)` are called with ids. */
  constructor(node, actions) {
    Object.assign(this, actions);
    this.list = node.querySelector(".conversations");
    this.field = node.querySelector("input[type=search]");
    this.empty = node.querySelector(".no-conversations");
    this.heads = [];
    this.found = null;
    this.field.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.#search(), SEARCH_MS);
    });
  }

  /** Show these conversations; one of them is current, some are running. */
  show(heads, current, running) {
    Object.assign(this, { heads, current, running });
    if (!this.list.querySelector("input")) this.#render(); // a title that is being typed stays
  }

  async #search() {
    const text = this.field.value.trim();
    this.found = text ? await this.search(text) : null;
    this.#render();
  }

  #render() {
    const shown = this.heads.filter(({ id }) => !this.found || this.found.has(id));
    this.empty.hidden = shown.length > 0;
    this.empty.textContent = this.found ? "No conversation has this text." : "Conversations are kept in this browser only.";
    const groups = Map.groupBy ? Map.groupBy(shown, group) : grouped(shown);
    this.list.replaceChildren(...[...groups].flatMap(([title, heads]) => [
      el("li", { className: "group", role: "presentation" }, title),
      ...heads.map((head) => this.#item(head)),
    ]));
  }

  #item(head) {
    const title = head.title || "New conversation";
    const item = el("li", { className: "conversation" });
    const open = el("button", {
      type: "button", className: "open", title, on: { click: () => this.open(head.id) },
      ...(head.id === this.current ? { aria: { current: "true" } } : {}),
    }, title, this.running.has(head.id) && el("span", { className: "dot", role: "img", aria: { label: "writing" } }));
    item.append(open, el("span", { className: "tools" },
      iconButton("edit", `Rename ${title}`, () => this.#rename(item, head)),
      iconButton("download", `Export ${title}`, () => this.exportOne(head.id)),
      iconButton("text", `Export ${title} as Markdown`, () => this.exportText(head.id)),
      iconButton("trash", `Delete ${title}`, () => this.remove(head.id, title))));
    return item;
  }

  #rename(item, head) {
    let done = false;
    const end = async (keep) => {
      if (done) return;
      done = true;
      const title = field.value.trim();
      field.remove();
      if (keep && title && title !== head.title) await this.rename(head.id, title);
      this.#render();
      [...this.list.querySelectorAll(".conversation")][this.heads.indexOf(head)]?.querySelector("button")?.focus();
    };
    const field = el("input", {
      value: head.title, maxLength: 200, aria: { label: "Title" },
      on: {
        blur: () => end(true),
        keydown: (event) => {
          if (event.key === "Enter") end(true);
          if (event.key === "Escape") end(false);
        },
      },
    });
    item.replaceChildren(field);
    field.select();
  }
}

function group({ updated }) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (updated >= today) return "Today";
  if (updated >= today - DAY) return "Yesterday";
  return updated >= today - 7 * DAY ? "Last week" : "Earlier";
}

function grouped(heads) {
  const groups = new Map();
  for (const head of heads) groups.set(group(head), [...(groups.get(group(head)) ?? []), head]);
  return groups;
}
