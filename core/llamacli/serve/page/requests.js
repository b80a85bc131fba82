// Bodies of requests, from a conversation and its settings.

import { media, toApi, toText } from "./tree.js";

export const N_TOP = 8;

/** Settings of a new conversation. */
export const DEFAULTS = {
  model: null,
  system: "",
  params: {},
  schema: "",
  tools: "",
  toolChoice: "auto",
  serverTools: true,
  reasoning: "",
  probabilities: false,
};

/**
 * Request of a reply: endpoint and body. `nodes` are the messages before it, `begun` the text that it continues,
 * `offered` the tools of the server.
 */
export function requestOf({ settings, nodes, begun = null, template = true, offered = [] }) {
  const { model, system, params } = settings;
  const body = { ...params, stream_options: { include_usage: true }, return_progress: true };
  if (model) body.model = model;
  const format = schemaOf(settings.schema);
  if (format) {
    if (begun?.content) throw new Error("A reply with a JSON schema cannot be continued: the schema begins with the reply.");
    body.response_format = format;
  }
  if (!template) {
    // The texts of a model without a chat template would never end by themselves.
    const prompt = begun === null ? toText(nodes, system) : toText([...nodes, begun], system);
    if (nodes.some((node) => media(node).length)) {
      throw new Error("The model has no chat template, so that it takes no pictures and no sound.");
    }
    if (settings.probabilities) body.logprobs = N_TOP;
    return { path: "v1/completions", body: { max_tokens: 256, ...body, prompt } };
  }
  const messages = toApi(begun?.content ? [...nodes, begun] : nodes, system);
  if (begun?.content) body.continue_final_message = true;
  const tools = allTools(settings, offered);
  if (tools) Object.assign(body, { tools, tool_choice: settings.toolChoice });
  if (settings.reasoning) body.reasoning_effort = settings.reasoning;
  if (settings.probabilities) Object.assign(body, { logprobs: true, top_logprobs: N_TOP });
  return { path: "v1/chat/completions", body: { ...body, messages } };
}

/** Request that scores a reply that is written: its tokens' probabilities, in a chat with one token more. */
export function scoringOf({ settings, nodes, reply, template = true, offered = [] }) {
  const model = settings.model ? { model: settings.model } : {};
  if (!template) {
    const prompt = toText([...nodes, reply], settings.system);
    return { path: "v1/completions", body: { ...model, prompt, echo: true, logprobs: N_TOP, max_tokens: 0 } };
  }
  const scored = { echo: true, continue_final_message: true, logprobs: true, top_logprobs: N_TOP, max_tokens: 1 };
  const tools = allTools(settings, offered);
  const messages = toApi([...nodes, { ...reply, calls: undefined }], settings.system);
  return { path: "v1/chat/completions", body: { ...model, ...scored, messages, ...(tools ? { tools } : {}) } };
}

/** Tools of the settings and, unless they are off, of the server; null for none. A name of the settings comes first. */
function allTools(settings, offered) {
  const own = toolsOf(settings.tools) ?? [];
  const names = new Set(own.map((tool) => tool.function.name));
  const more = settings.serverTools ? offered.filter((tool) => !names.has(tool.function.name)) : [];
  return own.length || more.length ? [...own, ...more] : null;
}

/** `response_format` of a JSON schema in text; null for none. Throws an Error in words. */
export function schemaOf(text) {
  if (!text.trim()) return null;
  const schema = parseJson(text, "The JSON schema");
  if (schema === null || typeof schema !== "object" || Array.isArray(schema)) {
    throw new Error("The JSON schema must be an object, such as {\"type\": \"object\"}.");
  }
  return { type: "json_schema", json_schema: { name: "reply", schema } };
}

/** Tools of JSON text in OpenAI's form, or a list of functions; null for none. Throws an Error in words. */
export function toolsOf(text) {
  if (!text.trim()) return null;
  const tools = parseJson(text, "The list of tools");
  if (!Array.isArray(tools)) throw new Error("The tools must be a JSON list.");
  return tools.map((tool, i) => {
    const described = tool?.type === "function" ? tool.function : tool;
    if (typeof described?.name !== "string" || !described.name) throw new Error(`Tool ${i + 1} has no name.`);
    return { type: "function", function: described };
  });
}

function parseJson(text, label) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label} is not JSON: ${error.message}`);
  }
}
