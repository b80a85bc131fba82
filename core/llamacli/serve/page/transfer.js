// Export of conversations as JSON and Markdown, import of JSON.

import { newId, path, ROOT } from "./tree.js";

const FORMAT = "llamacli-conversations";
const ROLES = new Set(["user", "assistant", "tool"]);

/** JSON text of conversations. */
export function toJson(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

/** Markdown text of the branch of a conversation that is shown. */
export function toMarkdown({ title, settings, ...conversation }) {
  const parts = [`# ${title || "Conversation"}`];
  if (settings?.system) parts.push("## System", settings.system);
  for (const { role, content, name, reasoning, calls, files } of path(conversation)) {
    parts.push(`## ${{ user: "User", assistant: "Assistant", tool: `Result of ${name}` }[role]}`);
    for (const file of files ?? []) if (file.text !== undefined) parts.push(`**${file.name}**`, fenced(file.text));
    if (reasoning) parts.push(reasoning.trim().split("\n").map((line) => `> ${line}`).join("\n"));
    if (content.trim()) parts.push(content.trim());
    for (const call of calls ?? []) parts.push(`**${call.name}**`, fenced(call.arguments, "json"));
  }
  return `${parts.join("\n\n")}\n`;
}

/** Block of code whose fence is longer than any in the text. */
function fenced(text, language = "") {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map(({ length }) => length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** Conversations of JSON text, with new ids. Throws an Error that says in words what is wrong. */
export function fromJson(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}`);
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) {
    throw new Error(`The file has no conversations of this page: "format" must be "${FORMAT}".`);
  }
  if (data.version !== 1) throw new Error(`The file has version ${data.version}; version 1 can be read.`);
  return data.conversations.map((one, i) => checked(one, `Conversation ${i + 1}`));
}

function checked(given, where) {
  const expect = (condition, problem) => {
    if (!condition) throw new Error(`${where}: ${problem}`);
  };
  expect(given && typeof given === "object" && given.nodes && typeof given.nodes === "object", "it has no messages.");
  expect(given.nodes[ROOT], "it has no first message.");
  const nodes = {};
  const visit = (id, parent) => {
    // An object from JSON may have keys such as "constructor" in its prototype.
    expect(Object.hasOwn(given.nodes, id) && !Object.hasOwn(nodes, id), `message ${id} is missing or there twice.`);
    const node = given.nodes[id];
    expect(Array.isArray(node.children) && node.children.every((child) => typeof child === "string"),
      `message ${id} has no list of replies.`);
    expect(id === ROOT || (ROLES.has(node.role) && typeof node.content === "string"),
      `message ${id} needs a role and a text.`);
    const chosen = node.children.includes(node.chosen) ? node.chosen : (node.children.at(-1) ?? null);
    nodes[id] = { ...known(node), id, parent, children: [...node.children], chosen };
    return node.children;
  };
  const open = [[ROOT, null]];
  while (open.length) {
    const [id, parent] = open.pop();
    for (const child of visit(id, parent)) open.push([child, id]);
  }
  return {
    id: newId(),
    title: typeof given.title === "string" ? given.title.slice(0, 200) : "",
    created: Number(given.created) || Date.now(),
    updated: Number(given.updated) || Date.now(),
    settings: given.settings && typeof given.settings === "object" ? given.settings : {},
    nodes,
  };
}

/** Fields of a message that have the right type. */
function known(node) {
  const result = {};
  for (const name of ["role", "content", "reasoning", "model", "finish", "state", "callId", "name"]) {
    if (typeof node[name] === "string") result[name] = node[name];
  }
  if (Number.isFinite(node.created)) result.created = node.created;
  if (Array.isArray(node.files)) {
    const isData = (value, kind) => typeof value === "string" && value.startsWith(`data:${kind}/`);
    result.files = node.files.filter((file) => typeof file?.name === "string" &&
      (typeof file.text === "string" || isData(file.image, "image") || isData(file.audio, "audio")));
  }
  if (Array.isArray(node.calls)) {
    result.calls = node.calls.filter((call) => typeof call?.name === "string" && typeof call.arguments === "string");
  }
  if (Array.isArray(node.tokens)) {
    const isToken = (token) => typeof token?.text === "string" && Number.isFinite(token.logprob);
    result.tokens = node.tokens.filter((token) => isToken(token) && Array.isArray(token.top) && token.top.every(isToken));
  }
  if (node.stats && typeof node.stats === "object") {
    result.stats = Object.fromEntries(Object.entries(node.stats).filter(([, value]) => Number.isFinite(value)));
  }
  return result;
}
