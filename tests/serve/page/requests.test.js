// Bodies of requests, parameters, server-sent events, tokens, highlighting.

import assert from "node:assert/strict";
import { highlightLine } from "./highlight.js";
import { groupsOf, LIMITS, LISTS, parse } from "./parameters.js";
import { DEFAULTS, requestOf, schemaOf, scoringOf, toolsOf } from "./requests.js";
import { events } from "./sse.js";
import { alternatives, fromChat, fromCompletion, join, level, percent } from "./tokens.js";

const nodes = [{ role: "user", content: "hi" }];
const settings = { ...DEFAULTS, model: "m", params: { temperature: 0 }, system: "S" };

// Requests.
const { path, body } = requestOf({ settings, nodes });
assert.equal(path, "v1/chat/completions");
assert.deepEqual([body.model, body.temperature, body.messages.length, body.return_progress], ["m", 0, 2, true]);
assert.ok(!("logprobs" in body) && !("tools" in body) && !("continue_final_message" in body));
const begun = { role: "assistant", content: "Once", reasoning: "think" };
const continued = requestOf({ settings: { ...settings, probabilities: true, reasoning: "low" }, nodes, begun }).body;
assert.deepEqual(continued.messages.at(-1), { role: "assistant", content: "Once", reasoning_content: "think" });
assert.deepEqual([continued.continue_final_message, continued.top_logprobs, continued.reasoning_effort], [true, 8, "low"]);
const plain = requestOf({ settings, nodes, begun, template: false });
assert.deepEqual([plain.path, plain.body.prompt, plain.body.max_tokens], ["v1/completions", "S\nhiOnce", 256]);
const schema = { ...settings, schema: '{"type": "object"}' };
assert.equal(requestOf({ settings: schema, nodes }).body.response_format.json_schema.schema.type, "object");
assert.throws(() => requestOf({ settings: schema, nodes, begun }), /cannot be continued/);
assert.deepEqual(toolsOf('[{"name": "a"}, {"type": "function", "function": {"name": "b"}}]').map((tool) => tool.function.name), ["a", "b"]);
const offered = ["a", "c"].map((name) => ({ type: "function", function: { name } }));
const named = (more) => requestOf({ settings: { ...settings, ...more }, nodes, offered }).body.tools?.map((tool) => tool.function.name);
assert.deepEqual(named({}), ["a", "c"]);
assert.deepEqual(named({ tools: '[{"name": "a"}, {"name": "b"}]' }), ["a", "b", "c"]);
assert.deepEqual(named({ serverTools: false }), undefined);
assert.throws(() => toolsOf("{}"), /JSON list/);
assert.throws(() => toolsOf('[{"x": 1}]'), /Tool 1 has no name/);
assert.throws(() => schemaOf("[1]"), /must be an object/);
assert.throws(() => schemaOf("{"), /not JSON/);
const scoring = scoringOf({ settings, nodes, reply: begun }).body;
assert.deepEqual([scoring.echo, scoring.continue_final_message, scoring.max_tokens], [true, true, 1]);

// Parameters.
const table = [
  { name: "temperature", group: "A", type: "number", minimum: 0, maximum: 1000000, description: "T." },
  { name: "top_k", group: "B", type: "integer", minimum: -1, maximum: null, description: "K." },
  { name: "top_p", group: "B", type: "number", minimum: 0, maximum: 1, description: "P." },
  { name: "dry_base", group: "A", type: "number", minimum: 1, maximum: 1000000, description: "D." },
];
const groups = groupsOf(table);
assert.deepEqual(groups.map(({ title, parameters }) => [title, parameters.map(({ label }) => label)]),
  [["A", ["Temperature", "DRY base"]], ["B", ["Top k", "Top p"]]]);
assert.deepEqual(groupsOf(undefined), []);
const PARAMETERS = [...groups.flatMap((group) => group.parameters), ...LIMITS, ...LISTS];
const parameter = (name) => PARAMETERS.find((one) => one.name === name);
assert.equal(parse(parameter("temperature"), "0.5"), 0.5);
assert.equal(parse(parameter("temperature"), " "), undefined);
assert.throws(() => parse(parameter("top_k"), "1.5"), /whole number/);
assert.throws(() => parse(parameter("top_p"), "1.5"), /from 0 to 1/);
assert.throws(() => parse(parameter("temperature"), "-1"), /at least 0/);
assert.equal(parse(parameter("temperature"), "100"), 100);
assert.deepEqual(parse(parameter("stop"), "a\n\nb"), ["a", "b"]);
assert.deepEqual(parse(parameter("logit_bias"), '{"4": -100}'), { 4: -100 });
assert.throws(() => parse(parameter("samplers"), "x"), /not JSON/);
assert.ok(PARAMETERS.every((one) => one.meaning.endsWith(".")));

// Server-sent events, cut at every byte.
const stream = new TextEncoder().encode(': ping\n\ndata: {"a": "ü"}\r\n\r\nevent: x\ndata: 1\ndata: 2\n\ndata: [DONE]\n\n');
for (let cut = 0; cut <= stream.length; cut += 1) {
  async function* chunks() {
    yield stream.slice(0, cut);
    yield stream.slice(cut);
  }
  const found = [];
  for await (const data of events(chunks())) found.push(data);
  assert.deepEqual(found, ['{"a": "ü"}', "1\n2", "[DONE]"]);
}

// Tokens.
const bytes = [...new TextEncoder().encode("ü")];
const tokens = fromChat({ content: [
  { token: "a", bytes: [97], logprob: -0.1, top_logprobs: [{ token: "a", bytes: [97], logprob: -0.1 }, { token: "b", bytes: [98], logprob: -3 }] },
  { token: "�", bytes: [bytes[0]], logprob: -1, top_logprobs: [] },
  { token: "�", bytes: [bytes[1]], logprob: -1, top_logprobs: [] },
] });
assert.equal(join(tokens), "aü");
assert.equal(join(tokens.slice(0, 2)), null); // within a character
assert.equal(tokens[1].bytes.length, 1);
assert.deepEqual(alternatives(tokens[0]).map(({ text, chosen }) => [text, chosen]), [["a", true], ["b", false]]);
assert.equal(alternatives(tokens[1]).length, 1); // the token itself, where it is not among the most probable
const completion = fromCompletion({ tokens: ["bytes:\\xc3", "x"], token_logprobs: [null, -1], top_logprobs: [null, { y: -0.5, x: -1 }] });
assert.deepEqual(completion[0].bytes, [0xc3]);
assert.deepEqual(completion[1].top.map(({ text }) => text), ["y", "x"]);
assert.deepEqual([0, -0.3, -2, -9].map(percent), ["100 %", "74 %", "14 %", "0.01 %"]);
assert.deepEqual([0, -0.5, -1.5, -3, -9].map(level), [1, 2, 3, 4, 5]);

// Highlighting: pieces are the line, and states go on over lines.
const kinds = (line, language, state = null) => highlightLine(line, language, state)[0].filter(([kind]) => kind).map(([kind, text]) => `${kind} ${text}`);
assert.deepEqual(kinds("def f(x):  # c", "python"), ["keyword def", "call f", "comment # c"]);
assert.deepEqual(kinds('let s = "a\\"b" + 0x1F; // "', "js"), ["keyword let", 'string "a\\"b"', "number 0x1F", 'comment // "']);
assert.deepEqual(kinds("SELECT 'x' -- c", "sql"), ["keyword SELECT", "string 'x'", "comment -- c"]);
assert.deepEqual(kinds('<a href="x">', "html"), ["keyword <a", 'string "x"', "keyword >"]);
const [, inside] = highlightLine("/* begins", "c", null);
assert.deepEqual(kinds("ends */ return 1", "c", inside), ["comment ends */", "keyword return", "number 1"]);
for (const language of ["python", "js", "c", "bash", "sql", "html", "css", "json", "yaml", "diff", "rust", "unknown", ""]) {
  for (const line of ["a `b` 'c", "'''", "# x // y -- z /* \"", "<!-- <b c='d'>", "", "\\", "0b1 1e5 1.2.3", "é = ü()"]) {
    assert.equal(highlightLine(line, language, null)[0].map(([, text]) => text).join(""), line);
  }
}
