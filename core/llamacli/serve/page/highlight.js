// Syntax highlighting: comments, strings, numbers and keywords of common languages, line by line.

const C_WORDS =
  "abstract as async auto await bool boolean break case catch char class const constexpr continue debugger default defer " +
  "delete do double else enum explicit export extends extern false final finally float fn for friend from func function " +
  "go goto if impl implements import in inline instanceof int interface internal is let long loop match mod mut " +
  "namespace new nil null nullptr of operator out override package private protected pub public readonly ref register " +
  "return self short signed sizeof static struct super switch template this throw throws trait true try type typedef " +
  "typename typeof undefined union unsafe unsigned use using val var virtual void volatile when where while with yield";
const PYTHON_WORDS =
  "False None True and as assert async await break case class continue def del elif else except finally for from global " +
  "if import in is lambda match nonlocal not or pass raise return self try while with yield";
const SHELL_WORDS =
  "case cd do done echo elif else esac eval exec exit export fi for function if in local read return set shift source " +
  "sudo test then trap unset until while";
const RUBY_WORDS =
  "alias and begin break case class def do else elsif end ensure false for if in module next nil not or require rescue " +
  "return self super then true unless until when while yield";
const LUA_WORDS =
  "and break do else elseif end false for function goto if in local nil not or repeat return then true until while";
const SQL_WORDS =
  "add all alter and as asc between by case check column constraint create cross database default delete desc distinct " +
  "drop else end exists foreign from full group having if in index inner insert into is join key left like limit not " +
  "null on or order outer primary references right select set table then union unique update values view when where with";

const C = { line: ["//"], block: [["/*", "*/"]], quotes: ["\"", "'"], words: C_WORDS };
const HASH = { line: ["#"], block: [], quotes: ["\"", "'"], words: "true false null yes no on off" };
const FAMILIES = {
  c: C,
  javascript: { ...C, block: [["/*", "*/"], ["`", "`", "string"]] },
  rust: { ...C, quotes: ["\""] }, // ' also begins a lifetime
  php: { ...C, line: ["//", "#"], words: `${C_WORDS} echo foreach elseif endif endforeach array` },
  python: { ...HASH, block: [["\"\"\"", "\"\"\"", "string"], ["'''", "'''", "string"]], words: PYTHON_WORDS },
  shell: { ...HASH, words: SHELL_WORDS },
  ruby: { ...HASH, words: RUBY_WORDS },
  lua: { line: ["--"], block: [["--[[", "]]"], ["[[", "]]", "string"]], quotes: ["\"", "'"], words: LUA_WORDS },
  sql: { line: ["--"], block: [["/*", "*/"]], quotes: ["'", "\""], words: SQL_WORDS, anyCase: true },
  config: HASH,
  json: { line: [], block: [], quotes: ["\""], words: "true false null" },
  css: { line: [], block: [["/*", "*/"]], quotes: ["\"", "'"], words: "important media import supports keyframes" },
  markup: { line: [], block: [["<!--", "-->"]], quotes: ["\"", "'"], words: "", tags: true },
  diff: { diff: true },
  none: { line: [], block: [], quotes: [], words: "", plain: true },
};
const NAMES = {
  c: "c cpp c++ cc h hpp java cs csharp c# go golang kotlin kt swift scala dart zig d glsl cuda objc proto",
  javascript: "js javascript jsx mjs ts typescript tsx",
  rust: "rust rs",
  php: "php",
  python: "python py python3 pyi",
  shell: "sh bash zsh shell console fish dockerfile docker makefile make cmake powershell ps1",
  ruby: "ruby rb elixir perl r julia nim",
  lua: "lua haskell hs",
  sql: "sql sqlite postgresql mysql",
  config: "yaml yml toml ini conf properties env nginx",
  json: "json jsonc json5 jsonl",
  css: "css scss less",
  markup: "html xml svg vue xhtml",
  diff: "diff patch",
  none: "text txt plain plaintext output log markdown md",
};
const BY_NAME = new Map(
  Object.entries(NAMES).flatMap(([family, names]) => names.split(" ").map((name) => [name, FAMILIES[family]])),
);
const WORDS = new Map();
const WORD = /[A-Za-z_$][\w$]*/y;
const NUMBER = /0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
const TAG = /<\/?[A-Za-z][\w:.-]*|\/?>/y;
const MAX_LINE = 2000; // longer lines are data rather than code

function wordsOf(family) {
  if (!WORDS.has(family)) WORDS.set(family, new Set(family.words.split(" ")));
  return WORDS.get(family);
}

/** Pieces of one line as [kind or null, text], and the state after it. The state before the first line is null. */
export function highlightLine(line, language, state) {
  const family = BY_NAME.get(language.toLowerCase()) ?? (language ? C : FAMILIES.none);
  if (family.diff) return [[[{ "+": "added", "-": "removed", "@": "keyword" }[line[0]] ?? null, line]], null];
  if (family.plain || line.length > MAX_LINE) return [[[null, line]], state];
  const pieces = [];
  let i = 0;
  let plain = 0;
  const push = (kind, end) => {
    if (plain < i) pieces.push([null, line.slice(plain, i)]);
    pieces.push([kind, line.slice(i, end)]);
    plain = i = end;
  };
  if (state) {
    const end = line.indexOf(state.close);
    if (end < 0) return [[[state.kind, line]], state];
    push(state.kind, end + state.close.length);
  }
  while (i < line.length) {
    const block = family.block.find(([open]) => line.startsWith(open, i));
    if (block) {
      const [open, close, kind = "comment"] = block;
      const end = line.indexOf(close, i + open.length);
      if (end < 0) {
        push(kind, line.length);
        return [pieces, { close, kind }];
      }
      push(kind, end + close.length);
      continue;
    }
    if (family.line.some((open) => line.startsWith(open, i)) && (line[i] !== "#" || i === 0 || /\s/.test(line[i - 1]))) {
      push("comment", line.length);
      break;
    }
    if (family.quotes.includes(line[i])) {
      push("string", stringEnd(line, i));
      continue;
    }
    const match = matchAt(family.tags ? TAG : WORD, line, i) ?? matchAt(WORD, line, i);
    if (match) {
      const end = i + match.length;
      const key = family.anyCase ? match.toLowerCase() : match;
      if (match[0] === "<" || match.endsWith(">") || wordsOf(family).has(key)) push("keyword", end);
      else if (line[end] === "(" && !family.tags) push("call", end);
      else i = end;
      continue;
    }
    const number = matchAt(NUMBER, line, i);
    if (number) push("number", i + number.length);
    else i += 1;
  }
  if (plain < line.length) pieces.push([null, line.slice(plain)]);
  return [pieces, null];
}

function matchAt(pattern, line, i) {
  pattern.lastIndex = i;
  return pattern.exec(line)?.[0];
}

function stringEnd(line, start) {
  for (let i = start + 1; i < line.length; i += 1) {
    if (line[i] === "\\") i += 1;
    else if (line[i] === line[start]) return i + 1;
  }
  return line.length;
}
