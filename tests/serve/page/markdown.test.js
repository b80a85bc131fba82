// Markdown parser: blocks, inline nodes, streams, hostile input.

import assert from "node:assert/strict";
import { nextBlock, parseBlocks, parseInline, safeUrl } from "./markdown.js";

const kinds = (text) => parseBlocks(text).map(({ type }) => type);
const plain = (nodes) => nodes.map((node) => (typeof node === "string" ? node : plain(node.children ?? [node.text ?? ""]))).join("");

// Blocks.
assert.deepEqual(kinds("# Title\ntext\n\n- a\n- b\n\n1. x\n\n> quote\n\n---\n\n```js\n1\n```\n"),
  ["heading", "paragraph", "list", "list", "quote", "rule", "code"]);
assert.deepEqual(kinds("text\n# Title\nmore"), ["paragraph", "heading", "paragraph"]);
assert.deepEqual(kinds("#hashtag and 2019. a year"), ["paragraph"]);
assert.deepEqual(kinds("In the year\n2019. it rained"), ["paragraph"]); // only 1. begins a list within a paragraph
assert.deepEqual(parseBlocks("## Two ##")[0].text, "Two");
assert.deepEqual(parseBlocks("```py\nx = 1\n\ny\n```\nafter")[0].lines, ["x = 1", "", "y"]);
assert.deepEqual(parseBlocks("````\n```\n````")[0].lines, ["```"]);
assert.equal(parseBlocks("```py\nx")[0].whole, false);
assert.deepEqual(parseBlocks("- a\n  - b\n  - c\n- d")[0].items, ["a\n- b\n- c", "d"]);
assert.deepEqual(parseBlocks("1. a\n   text\n\n   more\n2. b")[0].items, ["a\ntext\n\nmore", "b"]);
assert.deepEqual(parseBlocks("1. a\n  - b")[0].items, ["a\n- b"]); // models indent by two
assert.deepEqual(kinds("- a\n* b"), ["list", "list"]);
assert.equal(parseBlocks("3. c\n4. d")[0].start, 3);
assert.deepEqual(kinds("- a\n\ntext"), ["list", "paragraph"]);
assert.deepEqual(kinds("1. a\n\n```\nx\n```\n\n2. b"), ["list", "code", "list"]);
const table = parseBlocks("| a | b |\n|:-:|--:|\n| `x|y` | 2 |\n| only |\n\nend")[0];
assert.deepEqual([table.header, table.align, table.rows], [["a", "b"], ["center", "right"], [["`x|y`", "2"], ["only", ""]]]);
assert.deepEqual(kinds("a | b\n--- | ---\n1 | 2"), ["table"]);
assert.deepEqual(kinds("a - b\nc | d"), ["paragraph"]);
assert.deepEqual(kinds("<div>\n\n<script>alert(1)</script>"), ["paragraph", "paragraph"]);
assert.deepEqual(kinds(""), []);

// Inline.
assert.deepEqual(parseInline("a **b *c*** d"), ["a ", { type: "strong", children: ["b ", { type: "em", children: ["c"] }] }, " d"]);
assert.deepEqual(parseInline("snake_case_name 2 * 3 * 4"), ["snake", "_", "case", "_", "name 2 ", "*", " 3 ", "*", " 4"]);
assert.deepEqual(parseInline("~~gone~~ ~one~")[0], { type: "del", children: ["gone"] });
assert.deepEqual(parseInline("`a *b* <c>`"), [{ type: "code", text: "a *b* <c>" }]);
assert.deepEqual(parseInline("`` a`b ``"), [{ type: "code", text: "a`b" }]);
assert.equal(plain(parseInline("\\*not\\* `open")), "*not* `open");
assert.deepEqual(parseInline("x\ny"), ["x", { type: "br" }, "y"]);
assert.deepEqual(parseInline("[t **b**](https://e.org/a_(b))")[0].href, "https://e.org/a_(b)");
assert.deepEqual(parseInline("see https://e.org/x_y_z).").map((node) => node.href ?? node), ["see ", "https://e.org/x_y_z", ")."]);
assert.deepEqual(parseInline("<https://e.org>")[0].children, ["https://e.org"]);
assert.equal(parseInline("![alt](https://e.org/i.png)")[0].type, "link"); // no image is loaded
assert.equal(plain(parseInline("a &lt;b&gt; &amp;amp; &copy;")), "a <b> &amp; &copy;");
assert.equal(plain(parseInline("<img src=x onerror=alert(1)>")), "<img src=x onerror=alert(1)>");

// Links.
for (const url of ["javascript:alert(1)", " JaVaScRiPt:alert(1)", "java\nscript:alert(1)", "data:text/html,x", "vbscript:x", "file:///etc", "/path", "//host"]) {
  assert.equal(safeUrl(url), null, url);
  assert.equal(parseInline(`[x](${url})`).some((node) => node.type === "link"), false, url);
}
assert.equal(safeUrl("mailto:a@b.org"), "mailto:a@b.org");

// Streams: whatever the pieces, blocks that are closed stay as they are, and the end is the whole text's.
const text = "# T\n\npara **b**\nline\n\n- a\n  - b\n\n- c\n\n> q\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```js\nlet x\n\n# no\n```\n\nend\n#x\n---\n";
const strip = ({ begin, end, closed, ...block }) => block;
const whole = parseBlocks(text).map(strip);
for (let step = 1; step < 9; step += 1) {
  const blocks = [];
  let position = 0;
  for (let n = step; ; n += step) {
    const part = text.slice(0, n);
    const final = n >= text.length;
    for (let block = nextBlock(part, position, final); block?.closed; block = nextBlock(part, position, final)) {
      blocks.push(strip(block));
      position = block.end;
    }
    if (final) break;
  }
  assert.deepEqual(blocks, whole, `pieces of ${step}`);
}

// Formulas keep every backslash, and prices are no formulas.
const maths = (source) => parseInline(source).filter((node) => node.type === "math").map(({ tex, display }) => [tex, display]);
assert.deepEqual(maths("so \\( x = \\frac{a\\,b}{\\{c\\}} \\) and $y_1$"), [["x = \\frac{a\\,b}{\\{c\\}}", false], ["y_1", false]]);
assert.deepEqual(maths("$$a\\\\b$$ \\[c\\]"), [["a\\\\b", true], ["c", true]]);
assert.deepEqual(maths("$5 and $6, $7-$8"), []);
assert.deepEqual(maths("\\$a$, `$x$`, $ x $"), []);
assert.equal(plain(parseInline("\\( x = \\frac")), "\\( x = \\frac");
assert.equal(plain(parseInline("\\[not closed")), "\\[not closed");
assert.deepEqual(parseBlocks("a\n\\[\nx \\\\\n- y\n\\]\nb").map(({ type, tex }) => tex ?? type), ["paragraph", "x \\\\\n- y", "paragraph"]);
assert.deepEqual(parseBlocks("$$ e = mc^2 $$")[0].tex, "e = mc^2");
assert.deepEqual(kinds("\\[\nx\n\n# T"), ["paragraph", "heading"]);
const formulas = "t\n\n\\[\na\n- b\n\\]\n\n$$\nc\n\nd\n$$ e\n\nend\n";
for (let step = 1; step < 9; step += 1) {
  const blocks = [];
  let position = 0;
  for (let n = step; position < formulas.length; n += step) {
    const final = n >= formulas.length;
    const seen = formulas.slice(0, n);
    for (let block = nextBlock(seen, position, final); block?.closed; block = nextBlock(seen, position, final)) {
      blocks.push(strip(block));
      position = block.end;
    }
    if (final) break;
  }
  assert.deepEqual(blocks, parseBlocks(formulas).map(strip), `pieces of ${step}`);
}
