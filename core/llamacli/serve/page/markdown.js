// Markdown parser: blocks one at a time, so that a stream parses only its last block again.
//
// The result is plain data. Markup in the text stays text: HTML is not parsed at all.

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^\s`]*)[^`\n]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( {1,4})(?=\S)|[ \t]*$| +)/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MATH_BEGIN = /^ {0,3}(\$\$|\\\[)/;
const MATH_ENDS = { "$$": "$$", "\\[": "\\]", "\\(": "\\)", $: "$" };
const MAX_MATH = 4000; // characters of a formula
const MAX_DEPTH = 12;

/**
 * Block that begins at or after `start`, or null if only blank lines follow.
 *
 * `end` is where the next one begins. `closed` is false while more text could change the block.
 */
export function nextBlock(text, start, final = false) {
  let begin = start;
  for (;;) {
    if (begin >= text.length) return null;
    const end = lineEnd(text, begin);
    if (text.slice(begin, end).trim()) break;
    begin = end + 1;
  }
  const lines = new Lines(text, begin, final);
  const block = readBlock(lines);
  block.begin = begin;
  block.end = Math.min(lines.position, text.length);
  // A line that is not complete may become anything, so it proves nothing about the block before it.
  const proof = block.shut ? lines.position - 1 : lines.position;
  block.closed = final || (!block.open && proof < text.length && text.indexOf("\n", proof) >= 0);
  return block;
}

/** All blocks of a text that is complete. */
export function parseBlocks(text, depth = 0) {
  if (depth > MAX_DEPTH) return [{ type: "paragraph", text }];
  const blocks = [];
  for (let block = nextBlock(text, 0, true); block; block = nextBlock(text, block.end, true)) blocks.push(block);
  return blocks;
}

function lineEnd(text, from) {
  const end = text.indexOf("\n", from);
  return end < 0 ? text.length : end;
}

class Lines {
  constructor(text, position, final) {
    this.text = text;
    this.position = position;
    this.final = final;
  }

  /** Next line, or null at the end. */
  peek() {
    if (this.position >= this.text.length) return null;
    return this.text.slice(this.position, lineEnd(this.text, this.position)).replace(/\r$/, "").replaceAll("\t", "    ");
  }

  take() {
    const line = this.peek();
    this.position = lineEnd(this.text, this.position) + 1;
    return line;
  }
}

function readBlock(lines) {
  const first = lines.take();
  let match = FENCE.exec(first);
  if (match) return readFence(lines, match);
  match = MATH_BEGIN.exec(first);
  const math = match && readMath(lines, first, match);
  if (math) return math;
  match = HEADING.exec(first);
  if (match) return { type: "heading", level: match[1].length, text: match[2] ?? "", shut: true };
  if (RULE.test(first)) return { type: "rule", shut: true };
  if (QUOTE.test(first)) return readQuote(lines, first);
  match = ITEM.exec(first);
  if (match) return readList(lines, first, match);
  const second = lines.peek();
  if (first.includes("|") && second !== null && second.includes("-") && DELIMITERS.test(second)) {
    const header = cells(first);
    if (header.length === cells(second).length) return readTable(lines, header);
  }
  return readParagraph(lines, first);
}

function readFence(lines, [, indent, fence, language]) {
  const code = [];
  for (let line = lines.peek(); line !== null; line = lines.peek()) {
    lines.take();
    const trimmed = line.trim();
    if (trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length) && /^ {0,3}\S/.test(line)) {
      return { type: "code", language, lines: code, shut: true, whole: true };
    }
    code.push(line.startsWith(indent) ? line.slice(indent.length) : line.trimStart());
  }
  return { type: "code", language, lines: code, whole: false };
}

/** Formula on lines of its own, open while its end is missing, or null: then the lines are what they would be without it. */
function readMath(lines, first, [begin, mark]) {
  const end = MATH_ENDS[mark];
  const after = lines.position;
  const tex = [first.slice(begin.length)];
  for (let size = 0; size < MAX_MATH; size += tex.at(-1).length + 1) {
    const at = tex.at(-1).indexOf(end);
    if (at >= 0) {
      if (tex.at(-1).slice(at + end.length).trim()) break;
      tex.push(tex.pop().slice(0, at));
      return { type: "math", tex: tex.join("\n").trim(), shut: true };
    }
    if (lines.peek() === null && !lines.final) return { type: "paragraph", text: begin + tex.join("\n"), open: true };
    if (!lines.peek()?.trim()) break;
    tex.push(lines.take());
  }
  lines.position = after;
  return null;
}

function readQuote(lines, first) {
  const inner = [first.replace(QUOTE, "")];
  for (let line = lines.peek(); line !== null && line.trim(); line = lines.peek()) {
    if (!QUOTE.test(line) && startsBlock(line)) break;
    inner.push(lines.take().replace(QUOTE, ""));
  }
  return { type: "quote", text: inner.join("\n") };
}

function readList(lines, first, match) {
  const base = match[1].length;
  const kind = match[2].at(-1);
  const ordered = /\d/.test(match[2]);
  const items = [];
  let item = null;
  let width = 0;
  const begin = (line, [all, indent, marker, space]) => {
    width = indent.length + marker.length + (space?.length ?? 1);
    item = [line.slice(space === undefined ? all.length : width)];
    items.push(item);
  };
  begin(first, match);
  let blank = false;
  for (let line = lines.peek(); line !== null; line = lines.peek()) {
    if (!line.trim()) {
      const mark = lines.position;
      lines.take();
      let following = lines.peek();
      while (following !== null && !following.trim()) {
        lines.take();
        following = lines.peek();
      }
      const goes = following !== null && (indentOf(following) >= Math.min(width, base + 2) || isItem(following, base, kind));
      if (!goes) {
        if (following !== null) lines.position = mark;
        break;
      }
      item.push("");
      blank = true;
      continue;
    }
    const found = ITEM.exec(line);
    const indent = indentOf(line);
    if (found && indent < base + 2 && !RULE.test(line)) {
      if (!isItem(line, base, kind)) break;
      begin(lines.take(), found);
    } else if (indent >= Math.min(width, base + 2)) {
      item.push(lines.take().slice(Math.min(indent, width)));
    } else {
      if (blank || startsBlock(line)) break;
      item.push(lines.take());
    }
    blank = false;
  }
  const start = ordered ? parseInt(match[2], 10) : null;
  return { type: "list", ordered, start, items: items.map((one) => one.join("\n")) };
}

const indentOf = (line) => line.length - line.trimStart().length;

function isItem(line, base, kind) {
  const found = ITEM.exec(line);
  return Boolean(found) && !RULE.test(line) && found[1].length < base + 2 && found[2].at(-1) === kind;
}

function readTable(lines, header) {
  const align = cells(lines.take()).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left",
  );
  const rows = [];
  for (let line = lines.peek(); line !== null && line.trim() && line.includes("|"); line = lines.peek()) {
    const row = cells(lines.take());
    rows.push(header.map((_, i) => row[i] ?? ""));
  }
  return { type: "table", header, align, rows };
}

function cells(line) {
  const result = [];
  let cell = "";
  let code = false;
  const inner = line.trim().replace(/^\|/, "");
  for (let i = 0; i < inner.length; i += 1) {
    if (inner[i] === "\\" && inner[i + 1] === "|") {
      cell += "|";
      i += 1;
    } else if (inner[i] === "|" && !code) {
      result.push(cell.trim());
      cell = "";
    } else {
      if (inner[i] === "`") code = !code && inner.indexOf("`", i + 1) > i;
      cell += inner[i];
    }
  }
  if (cell.trim()) result.push(cell.trim());
  return result;
}

function readParagraph(lines, first) {
  const inner = [first];
  for (let line = lines.peek(); line !== null && line.trim() && !startsBlock(line); line = lines.peek()) {
    inner.push(lines.take());
  }
  return { type: "paragraph", text: inner.join("\n") };
}

function startsBlock(line) {
  if (MATH_BEGIN.test(line)) return true;
  const item = ITEM.exec(line);
  const list = item && item[1].length < 4 && item[3] !== undefined && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || Boolean(list);
}

// --- inline

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const URL_AT = /https?:\/\/[^\s<>"`]+/y;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const ENTITY = /&(?:amp|lt|gt|quot|nbsp|#39);/y;
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": "\"", "&nbsp;": "\u00a0", "&#39;": "'" };
const PUNCTUATION = /[!-/:-@[-`{-~\p{P}\p{S}]/u;
const MAX_NESTING = 32;
const MAX_URL = 2000;

/** Address that may become a link, or null. */
export function safeUrl(text) {
  try {
    const url = new URL(text);
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** Inline nodes of a text: strings, and {type, ...} for code, math, strong, em, del, link and br. */
export function parseInline(text) {
  const items = [];
  const brackets = [];
  const missing = new Set(); // lengths of backtick runs that nothing closes
  let plain = "";
  const flush = () => {
    if (plain) items.push(plain);
    plain = "";
  };
  const push = (item) => {
    flush();
    items.push(item);
  };
  let i = 0;
  while (i < text.length) {
    const c = text[i];
    const math = (c === "$" || c === "\\") && mathAt(text, i);
    if (math) {
      push({ type: "math", tex: math.tex, display: math.display });
      i = math.end;
    } else if (c === "\\" && /[([]/.test(text[i + 1] ?? "")) {
      plain += text.slice(i, i + 2); // a formula that is not complete keeps its backslash
      i += 2;
    } else if (c === "\\" && i + 1 < text.length && /[!-/:-@[-`{-~]/.test(text[i + 1])) {
      plain += text[i + 1];
      i += 2;
    } else if (c === "\n") {
      plain = plain.replace(/ +$/, "");
      push({ type: "br" });
      i += 1;
    } else if (c === "`") {
      const n = runLength(text, i);
      const end = missing.has(n) ? -1 : closingRun(text, i + n, n);
      if (end < 0) {
        missing.add(n);
        plain += text.slice(i, i + n);
        i += n;
      } else {
        const code = text.slice(i + n, end).replaceAll("\n", " ");
        push({ type: "code", text: /^ .*\S.* $/.test(code) ? code.slice(1, -1) : code });
        i = end + n;
      }
    } else if (c === "*" || c === "_" || c === "~") {
      const n = runLength(text, i);
      push(delimiter(text, i, n));
      i += n;
    } else if (c === "[" || (c === "!" && text[i + 1] === "[")) {
      const length = c === "!" ? 2 : 1; // an image is shown as a link: nothing is loaded from elsewhere
      push({ bracket: text.slice(i, i + length) });
      brackets.push(items.length - 1);
      i += length;
    } else if (c === "]" && brackets.length) {
      flush();
      const open = brackets.pop();
      const target = text[i + 1] === "(" ? linkTarget(text, i + 2) : null;
      const href = target && safeUrl(target.url);
      if (href) {
        const inner = resolve(items.splice(open).slice(1));
        items.push({ type: "link", href, children: inner.length ? inner : [href] });
        brackets.length = 0; // links are not nested
        i = target.end;
      } else {
        plain += "]";
        i += 1;
      }
    } else if (c === "<" || c === "h" || c === "&") {
      const entity = c === "&" && matchAt(ENTITY, text, i);
      const auto = c === "<" ? matchAt(AUTOLINK, text, i) : c === "h" && !/\w/.test(text[i - 1] ?? "") && bareUrl(text, i);
      const href = auto && safeUrl(c === "<" ? auto.slice(1, -1) : auto);
      if (entity) {
        plain += ENTITIES[entity];
        i += entity.length;
      } else if (href) {
        push({ type: "link", href, children: [c === "<" ? auto.slice(1, -1) : auto] });
        i += auto.length;
      } else {
        plain += c;
        i += 1;
      }
    } else {
      let end = i + 1;
      while (end < text.length && !"\\\n`*_~[]!<h&$".includes(text[end])) end += 1;
      plain += text.slice(i, end);
      i = end;
    }
  }
  flush();
  return resolve(items);
}

/**
 * Formula at a position: {tex, display, end}, or null.
 *
 * Between single dollars it neither begins nor ends with a space, and no digit follows: $5 and $6 are prices.
 */
function mathAt(text, i) {
  const mark = MATH_ENDS[text.slice(i, i + 2)] ? text.slice(i, i + 2) : text[i];
  if (!MATH_ENDS[mark]) return null;
  const begin = i + mark.length;
  const window = text.slice(begin, begin + MAX_MATH);
  const close = MATH_ENDS[mark];
  for (let at = window.indexOf(close); at >= 0; at = window.indexOf(close, at + close.length)) {
    if (mark.length === 1) {
      if (window[at - 1] === "\\") continue;
      if (/^\s/.test(window) || /\s/.test(window[at - 1]) || /\d/.test(window[at + 1] ?? "")) return null;
      if (window.slice(0, at).includes("`")) return null;
    }
    const tex = window.slice(0, at).trim();
    return tex ? { tex, display: mark === "$$" || mark === "\\[", end: begin + at + close.length } : null;
  }
  return null;
}

function matchAt(pattern, text, i) {
  pattern.lastIndex = i;
  return pattern.exec(text)?.[0];
}

function bareUrl(text, i) {
  let url = matchAt(URL_AT, text, i);
  while (url && /[.,;:!?'*_~)\]]$/.test(url)) {
    if (url.endsWith(")") && url.split("(").length >= url.split(")").length) break;
    url = url.slice(0, -1);
  }
  return url;
}

function runLength(text, i) {
  let end = i + 1;
  while (text[end] === text[i]) end += 1;
  return end - i;
}

function closingRun(text, from, n) {
  for (let i = text.indexOf("`", from); i >= 0; i = text.indexOf("`", i)) {
    const length = runLength(text, i);
    if (length === n) return i;
    i += length;
  }
  return -1;
}

function linkTarget(text, start) {
  let depth = 0;
  const end = Math.min(text.length, start + MAX_URL);
  for (let i = start; i < end && text[i] !== "\n" && depth < MAX_NESTING; i += 1) {
    if (text[i] === "(") depth += 1;
    else if (text[i] === ")" && depth === 0) {
      const url = text.slice(start, i).trim().replace(/\s+(?:"[^"]*"|'[^']*')$/, "").replace(/^<(.*)>$/, "$1");
      return { url, end: i + 1 };
    } else if (text[i] === ")") depth -= 1;
  }
  return null;
}

/** Run of emphasis characters, by CommonMark's rules of flanking. */
function delimiter(text, i, n) {
  const before = text[i - 1] ?? " ";
  const after = text[i + n] ?? " ";
  const left = !/\s/.test(after) && (!PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before));
  const right = !/\s/.test(before) && (!PUNCTUATION.test(before) || /\s/.test(after) || PUNCTUATION.test(after));
  const under = text[i] === "_";
  return {
    char: text[i],
    n,
    open: left && (!under || !right || PUNCTUATION.test(before)),
    close: right && (!under || !left || PUNCTUATION.test(after)),
  };
}

/** Join runs of emphasis that belong together. */
function resolve(items) {
  const stack = [{ children: [] }];
  const top = () => stack[stack.length - 1];
  const drop = () => {
    const { char, left, children } = stack.pop();
    top().children.push(char.repeat(left));
    for (const child of children) top().children.push(child);
  };
  for (const item of items) {
    if (typeof item === "string" || item.type) {
      top().children.push(item);
      continue;
    }
    if (item.bracket) {
      top().children.push(item.bracket);
      continue;
    }
    let left = item.n;
    while (item.close && left > 0) {
      const k = stack.findLastIndex((frame) => frame.char === item.char);
      if (k < 0 || (item.char === "~" && (left < 2 || stack[k].left < 2))) break;
      while (stack.length - 1 > k) drop();
      const frame = top();
      const use = frame.left >= 2 && left >= 2 ? 2 : 1;
      const type = item.char === "~" ? "del" : use === 2 ? "strong" : "em";
      const node = { type, children: frame.children };
      frame.left -= use;
      left -= use;
      if (frame.left === 0) {
        stack.pop();
        top().children.push(node);
      } else frame.children = [node];
    }
    if (left > 0 && item.open && stack.length < MAX_NESTING) stack.push({ char: item.char, left, children: [] });
    else if (left > 0) top().children.push(item.char.repeat(left));
  }
  while (stack.length > 1) drop();
  return stack[0].children;
}
