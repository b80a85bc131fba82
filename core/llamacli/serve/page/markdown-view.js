// DOM of Markdown that grows: blocks that are complete are never touched again.

import { copyText, el, iconButton } from "./dom.js";
import { highlightLine } from "./highlight.js";
import { formula } from "./math.js";
import { nextBlock, parseBlocks, parseInline } from "./markdown.js";

const SLICE_MS = 6;

export class MarkdownView {
  /** View in this element. */
  constructor(root) {
    this.root = root;
    this.text = "";
    this.position = 0; // where the first block that may still change begins
    this.tail = null;
    this.last = null; // the last block that was shown
  }

  /** Show a text. Returns true when all of it is shown; else more calls are needed, best one a frame. */
  update(text, final) {
    if (!text.startsWith(this.text)) this.clear();
    const grown = text !== this.text;
    if (this.final && grown && this.last) {
      // The text goes on: its last block is not complete after all.
      this.position = this.last.begin;
      this.tail = this.last.view;
    }
    this.text = text;
    this.final = final || (this.final && !grown);
    const deadline = performance.now() + SLICE_MS;
    while (performance.now() < deadline) {
      const block = nextBlock(text, this.position, final);
      if (block === null) {
        this.drop();
        return true;
      }
      this.tail = this.show(block, this.tail);
      this.last = { begin: block.begin, view: this.tail };
      if (!block.closed) return true;
      this.position = block.end;
      this.tail = null;
    }
    return false;
  }

  clear() {
    this.root.replaceChildren();
    this.position = 0;
    this.tail = this.last = null;
  }

  drop() {
    this.tail?.node.remove();
    this.tail = null;
  }

  /** Show a block, in place of the same block as it was before. */
  show(block, old) {
    const view = old?.update?.(block) ? old : VIEWS[block.type](block);
    if (view !== old) {
      if (old) old.node.replaceWith(view.node);
      else this.root.append(view.node);
    }
    return view;
  }
}

const VIEWS = {
  paragraph: (block) => ({ node: el("p", {}, inline(block.text)) }),
  heading: (block) => ({ node: el(`h${Math.min(6, block.level + 2)}`, { className: `h${block.level}` }, inline(block.text)) }),
  rule: () => ({ node: el("hr") }),
  quote: (block) => ({ node: el("blockquote", {}, children(block.text, 1)) }),
  code: (block) => new CodeView(block),
  math: (block) => ({ node: el("div", { className: "math-block", tabIndex: 0 }, formula(block.tex, true)) }),
  list: (block) => new ListView(block),
  table: (block) => new TableView(block),
};

/** Elements of the blocks of a text. A single paragraph is shown without <p>, as in tight lists. */
function children(text, depth) {
  const blocks = parseBlocks(text, depth);
  if (blocks[0]?.type === "paragraph" && blocks.slice(1).every(({ type }) => type === "list")) {
    return [...inline(blocks[0].text), ...blocks.slice(1).map((block) => new ListView(block, depth).node)];
  }
  return blocks.map((block) => {
    if (block.type === "list") return new ListView(block, depth).node;
    if (block.type === "quote") return el("blockquote", {}, children(block.text, depth + 1));
    return VIEWS[block.type](block).node;
  });
}

class ListView {
  constructor(block, depth = 0) {
    this.depth = depth;
    this.ordered = block.ordered;
    this.node = el(block.ordered ? "ol" : "ul", block.ordered && block.start !== 1 ? { start: block.start } : {});
    this.items = [];
    this.update(block);
  }

  update(block) {
    if (block.type !== "list" || block.ordered !== this.ordered) return false;
    grow(this.node, this.items, block.items, (text) => el("li", {}, this.item(text)));
    return true;
  }

  item(text) {
    const task = /^\[([ xX])\] /.exec(text);
    if (!task) return children(text, this.depth + 1);
    const box = el("input", { type: "checkbox", checked: task[1] !== " ", disabled: true, aria: { label: "task" } });
    return [box, " ", ...children(text.slice(4), this.depth + 1)];
  }
}

class TableView {
  constructor(block) {
    this.header = block.header.join("|");
    const cell = (tag) => (text, i) => el(tag, { className: block.align[i] ?? "left" }, inline(text));
    this.row = (row) => el("tr", {}, row.map(cell("td")));
    this.body = el("tbody");
    const table = el("table", {}, el("thead", {}, el("tr", {}, block.header.map(cell("th")))), this.body);
    this.node = el("div", { className: "table", tabIndex: 0, role: "region", aria: { label: "Table" } }, table);
    this.rows = [];
    this.update(block);
  }

  update(block) {
    if (block.type !== "table" || block.header.join("|") !== this.header) return false;
    grow(this.body, this.rows, block.rows.map((row) => row.join("\u0000")), (text) => this.row(text.split("\u0000")));
    return true;
  }
}

/** Make the children of a node those of `texts`; those whose text is the same stay. */
function grow(node, shown, texts, make) {
  let same = 0;
  while (same < shown.length && same < texts.length && shown[same] === texts[same]) same += 1;
  while (node.children.length > same) node.lastElementChild.remove();
  for (let i = same; i < texts.length; i += 1) node.append(make(texts[i]));
  shown.splice(same, Infinity, ...texts.slice(same));
}

class CodeView {
  constructor(block) {
    this.language = block.language;
    this.shown = []; // lines, each with the state before it
    this.code = el("code");
    const copy = iconButton("copy", "Copy the code", () => copyText(this.source, copy));
    const bar = el("div", { className: "code-bar" }, el("span", {}, block.language || "code"), copy);
    const body = el("pre", { tabIndex: 0, aria: { label: `Code ${block.language}`.trim() } }, this.code);
    this.node = el("div", { className: "code" }, bar, body);
    this.update(block);
  }

  update(block) {
    if (block.type !== "code" || block.language !== this.language) return false;
    let same = 0;
    while (same < this.shown.length && this.shown[same].line === block.lines[same]) same += 1;
    let state = same < this.shown.length ? this.shown[same].before : this.after ?? null;
    while (this.code.children.length > same) this.code.lastElementChild.remove();
    this.shown.length = same;
    for (const line of block.lines.slice(same)) {
      const [pieces, after] = highlightLine(line, this.language, state);
      const nodes = pieces.map(([kind, text]) => (kind ? el("span", { className: `hl-${kind}` }, text) : text));
      this.code.append(el("span", { className: "line" }, ...nodes, "\n"));
      this.shown.push({ line, before: state });
      state = after;
    }
    this.after = state;
    this.source = block.lines.join("\n");
    return true;
  }
}

const TAGS = { strong: "strong", em: "em", del: "del" };

function inline(text) {
  return nodesOf(parseInline(text));
}

function nodesOf(items) {
  return items.map((item) => {
    if (typeof item === "string") return document.createTextNode(item);
    if (item.type === "br") return el("br");
    if (item.type === "code") return el("code", {}, item.text);
    if (item.type === "math") return formula(item.tex, item.display);
    if (item.type === "link") {
      return el("a", { href: item.href, target: "_blank", rel: "noopener noreferrer" }, nodesOf(item.children));
    }
    return el(TAGS[item.type], {}, nodesOf(item.children));
  });
}
