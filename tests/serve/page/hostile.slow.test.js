// Markdown parser: input that is meant to take long.

import assert from "node:assert/strict";
import { parseBlocks, parseInline } from "./markdown.js";

const plain = (nodes) => nodes.map((node) => (typeof node === "string" ? node : plain(node.children ?? [node.text ?? ""]))).join("");

// Hostile input takes no longer than its length deserves, and no stack.
const began = performance.now();
for (const piece of ["*", "_a_ ", "[", "![", "](", "`", "> ", "- ", "**a ", "~~", "|", "<", "&", "h", "\\", "1. ", "# ", "``` ", "a*_", "[x](", "((", "`` ` "]) {
  const hostile = piece.repeat(10_000);
  for (const block of parseBlocks(hostile)) plain(parseInline(block.text ?? ""));
  parseBlocks(hostile.replaceAll(" ", "\n"));
}
let nested = "";
for (let i = 0; i < 500; i += 1) nested += `${" ".repeat(i * 2)}- x\n`;
parseBlocks(nested);
assert.ok(performance.now() - began < 10_000, `${performance.now() - began} ms`);
