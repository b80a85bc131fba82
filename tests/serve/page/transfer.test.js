// Markdown of a conversation.

import assert from "node:assert/strict";
import { toMarkdown } from "./transfer.js";
import { add, newConversation, ROOT } from "./tree.js";

const conversation = newConversation({ system: "Be brief." });
conversation.title = "Foxes";
const user = add(conversation, ROOT, { role: "user", content: "Read this.", files: [{ name: "a.md", text: "```\nx\n```\n" }] });
const reply = add(conversation, user.id, { role: "assistant", content: "", reasoning: "one\ntwo", calls: [{ name: "f", arguments: "{}" }] });
add(conversation, reply.id, { role: "tool", name: "f", content: "42" });
assert.equal(
  toMarkdown(conversation),
  "# Foxes\n\n## System\n\nBe brief.\n\n## User\n\n**a.md**\n\n````\n```\nx\n```\n````\n\nRead this.\n\n"
  + "## Assistant\n\n> one\n> two\n\n**f**\n\n```json\n{}\n```\n\n## Result of f\n\n42\n",
);
