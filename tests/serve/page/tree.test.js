// Conversations: branches, the API's messages, export and import.

import assert from "node:assert/strict";
import { fromJson, toJson } from "./transfer.js";
import { add, choose, contains, newConversation, path, pathTo, remove, ROOT, siblings, titleOf, toApi, toText } from "./tree.js";

const texts = (conversation) => path(conversation).map(({ content }) => content);

const talk = newConversation({ system: "" });
assert.deepEqual(path(talk), []);
const hi = add(talk, ROOT, { role: "user", content: "Hi there" });
const first = add(talk, hi.id, { role: "assistant", content: "one" });
add(talk, first.id, { role: "user", content: "more" });
const second = add(talk, hi.id, { role: "assistant", content: "two" });
assert.deepEqual(texts(talk), ["Hi there", "two"]);
assert.deepEqual(siblings(talk, second.id), { index: 1, ids: [first.id, second.id] });
choose(talk, first.id);
assert.deepEqual(texts(talk), ["Hi there", "one", "more"]);
assert.deepEqual(pathTo(talk, second.id).map(({ content }) => content), ["Hi there", "two"]);
assert.equal(titleOf(talk), "Hi there");
assert.ok(contains(talk, "TWO"));
assert.ok(!contains(talk, "three"));

// Export and import keep all branches, under a new id.
const [back] = fromJson(toJson([talk]));
assert.deepEqual(texts(back), texts(talk));
assert.notEqual(back.id, talk.id);
assert.equal(Object.keys(back.nodes).length, Object.keys(talk.nodes).length);

remove(talk, first.id);
assert.deepEqual(texts(talk), ["Hi there", "two"]);
assert.equal(Object.keys(talk.nodes).length, 3);

// Messages in the API's form.
const call = { id: "c1", name: "weather", arguments: "{}" };
const nodes = [
  { role: "user", content: "look", files: [{ name: "a.md", text: "```\nx\n```" }] },
  { role: "assistant", content: "", reasoning: "hm", calls: [call] },
  { role: "tool", content: "sunny", callId: "c1", name: "weather" },
];
const [system, user, assistant, tool] = toApi(nodes, "Be brief.");
assert.deepEqual(system, { role: "system", content: "Be brief." });
assert.equal(user.content, "a.md:\n````\n```\nx\n```\n````\n\nlook");
assert.deepEqual(assistant.tool_calls, [{ id: "c1", type: "function", function: { name: "weather", arguments: "{}" } }]);
assert.equal(assistant.reasoning_content, "hm");
assert.deepEqual(tool, { role: "tool", content: "sunny", tool_call_id: "c1", name: "weather" });
const story = [{ role: "user", content: "Once" }, { role: "assistant", content: " upon" }, { role: "user", content: "And" }];
assert.equal(toText(story, ""), "Once upon\nAnd");

// Bad files are refused in words.
const bad = (change) => {
  const data = JSON.parse(toJson([talk]));
  change(data, data.conversations[0]);
  return () => fromJson(JSON.stringify(data));
};
assert.throws(() => fromJson("{"), /not JSON/);
assert.throws(() => fromJson("[]"), /no conversations of this page/);
assert.throws(bad((data) => { data.version = 2; }), /version 2/);
assert.throws(bad((_, one) => { delete one.nodes; }), /Conversation 1: it has no messages/);
assert.throws(bad((_, one) => { one.nodes[hi.id].children = ["nowhere"]; }), /missing or there twice/);
assert.throws(bad((_, one) => { one.nodes[second.id].children = [hi.id]; }), /missing or there twice/);
assert.throws(bad((_, one) => { one.nodes[hi.id].role = "root"; }), /needs a role/);
assert.throws(bad((_, one) => { one.nodes[hi.id].children = ["constructor"]; }), /missing/);
