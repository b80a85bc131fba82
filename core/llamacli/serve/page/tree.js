// Conversations as trees of messages: an edit or another reply is a branch beside the old one.

export const ROOT = "root";

/** Random id. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(36).padStart(2, "0")).join("");
}

/** Empty conversation with these settings. */
export function newConversation(settings) {
  const now = Date.now();
  const nodes = { [ROOT]: { id: ROOT, parent: null, children: [], chosen: null } };
  return { id: newId(), title: "", created: now, updated: now, settings: structuredClone(settings), nodes };
}

/** Add a message after another one; it becomes the branch that is shown. */
export function add(conversation, parent, message) {
  const node = { id: newId(), created: Date.now(), content: "", ...message, parent, children: [], chosen: null };
  conversation.nodes[node.id] = node;
  conversation.nodes[parent].children.push(node.id);
  conversation.nodes[parent].chosen = node.id;
  conversation.updated = Date.now();
  return node;
}

/** Messages of the branch that is shown, first to last. */
export function path(conversation) {
  const result = [];
  let node = conversation.nodes[ROOT];
  while (node.chosen !== null) {
    node = conversation.nodes[node.chosen];
    result.push(node);
  }
  return result;
}

/** Messages from the first to this one. */
export function pathTo(conversation, id) {
  const result = [];
  for (let node = conversation.nodes[id]; node.id !== ROOT; node = conversation.nodes[node.parent]) result.unshift(node);
  return result;
}

/** Number of this message among its siblings, from 0, and their ids. */
export function siblings(conversation, id) {
  const ids = conversation.nodes[conversation.nodes[id].parent].children;
  return { index: ids.indexOf(id), ids };
}

/** Show the branch of a message. */
export function choose(conversation, id) {
  conversation.nodes[conversation.nodes[id].parent].chosen = id;
}

/** Delete a message and all that follow it; a sibling is shown in its place. */
export function remove(conversation, id) {
  const parent = conversation.nodes[conversation.nodes[id].parent];
  const index = parent.children.indexOf(id);
  parent.children.splice(index, 1);
  if (parent.chosen === id) parent.chosen = parent.children[Math.min(index, parent.children.length - 1)] ?? null;
  const doomed = [id];
  while (doomed.length) {
    const node = conversation.nodes[doomed.pop()];
    doomed.push(...node.children);
    delete conversation.nodes[node.id];
  }
  conversation.updated = Date.now();
}

/** Text of a user's message with its files of text, as the model sees it. */
export function fullText(node) {
  const files = (node.files ?? []).filter(({ text }) => text !== undefined).map(({ name, text }) => {
    const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), (run) => run[0].length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}\n\n`;
  });
  return files.join("") + node.content;
}

/** Parts of a message's pictures and sound, in the form of OpenAI's API. */
export const media = (node) => (node.files ?? []).filter(({ text }) => text === undefined).map(({ image, audio }) => image ?
  { type: "image_url", image_url: { url: image } } :
  { type: "input_audio", input_audio: { data: audio.slice(audio.indexOf(",") + 1), format: "wav" } });

/** Content of a user's message in the form of OpenAI's API: its text, or its pictures, its sound and its text. */
function contentOf(node) {
  const text = fullText(node);
  const parts = media(node);
  return parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text;
}

/** Messages in the form of OpenAI's API. */
export function toApi(nodes, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const node of nodes) {
    if (node.role === "user") messages.push({ role: "user", content: contentOf(node) });
    else if (node.role === "tool") {
      messages.push({ role: "tool", content: node.content, tool_call_id: node.callId, name: node.name });
    } else {
      const message = { role: "assistant", content: node.content };
      if (node.reasoning) message.reasoning_content = node.reasoning;
      if (node.calls?.length) {
        message.tool_calls = node.calls.map((call) => ({
          id: call.id,
          type: "function",
          function: { name: call.name, arguments: call.arguments },
        }));
      }
      messages.push(message);
    }
  }
  return messages;
}

/** Prompt for a model without a chat template: the texts, of which replies continue the ones before them. */
export function toText(nodes, system) {
  return nodes.reduce((text, node) => {
    const gap = text && node.role !== "assistant" ? "\n" : "";
    return text + gap + fullText(node);
  }, system);
}

/** Title made of the first message. */
export function titleOf(conversation) {
  const first = conversation.nodes[ROOT].children.map((id) => conversation.nodes[id])[0];
  const text = (first?.content || first?.files?.[0]?.name || "").trim().replace(/\s+/g, " ");
  return text.length > 60 ? `${text.slice(0, 57).trimEnd()}…` : text || "New conversation";
}

/** True if a conversation has this text, in any branch. */
export function contains(conversation, text) {
  const wanted = text.toLowerCase();
  return (
    conversation.title.toLowerCase().includes(wanted) ||
    Object.values(conversation.nodes).some((node) => node.content?.toLowerCase().includes(wanted))
  );
}
