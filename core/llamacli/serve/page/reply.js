// Reply that is being written: the request, its stream, retries, numbers.

import { ApiError, isTemporary, post, stream, titleOf } from "./api.js";
import { requestOf, scoringOf } from "./requests.js";
import { fromChat, fromCompletion } from "./tokens.js";

const MAX_RETRIES = 5;
const RETRY_S = 5;

/** Models without a chat template, which continue texts. */
const withoutTemplate = new Set();

export const hasTemplate = (model) => !withoutTemplate.has(model ?? "");

export class Reply {
  /**
   * Reply in the message `node`, after the messages `nodes`. A text that it has already is continued. `offered` are the
   * tools of the server.
   *
   * `changed` is called for each change, `ended` once. `phase` is "waiting", "prompt", "writing", "retrying" or "done".
   */
  constructor({ conversation, node, nodes, offered, changed, ended }) {
    Object.assign(this, { conversation, node, nodes, offered, changed, ended });
    this.phase = "waiting";
    this.progress = null;
    this.retryAt = 0;
    this.pieces = 0;
    this.abort = new AbortController();
  }

  /** Write the reply; returns when it has ended, for whatever reason. */
  async run() {
    const { node } = this;
    this.began = performance.now();
    node.state = "writing";
    delete node.error;
    delete node.finish;
    try {
      for (let attempt = 0; ; attempt += 1) {
        try {
          await this.#attempt();
          break;
        } catch (error) {
          if (!(error instanceof ApiError) || !isTemporary(error) || this.pieces || attempt >= MAX_RETRIES) throw error;
          await this.#pause(error);
        }
      }
      delete node.state;
    } catch (error) {
      node.state = this.abort.signal.aborted ? "stopped" : "failed";
      if (!this.abort.signal.aborted) node.error = plainError(error);
    }
    this.phase = "done";
    delete this.retrying;
    this.changed(this);
    this.ended(this);
  }

  /** End the reply; what is written stays. */
  stop() {
    this.abort.abort();
    this.retryNow?.();
  }

  /** Tokens a second so far, about: pieces of text, which are mostly tokens. */
  get rate() {
    const seconds = (performance.now() - this.firstAt) / 1000;
    return this.pieces > 4 && seconds > 0.5 ? this.pieces / seconds : null;
  }

  async #attempt() {
    const { settings } = this.conversation;
    const template = hasTemplate(settings.model);
    const begun = this.node.content ? this.node : null;
    const { path, body } = requestOf({ settings, nodes: this.nodes, begun, template, offered: this.offered });
    this.phase = "waiting";
    this.changed(this);
    const read = template ? (data) => this.#readChat(data) : (data) => this.#readCompletion(data);
    try {
      for await (const data of stream(path, body, this.abort.signal)) {
        if (data.model) this.node.model = data.model;
        if (data.prompt_progress) this.#showProgress(data.prompt_progress);
        if (data.choices?.length) read(data.choices[0]);
        if (data.usage) this.#count(data.usage, data.timings);
        this.changed(this);
      }
    } catch (error) {
      // The field that is at fault is named where a template refuses messages, not where there is no template.
      if (error.code !== "chat_template_error" || error.param || !template) throw error;
      withoutTemplate.add(settings.model ?? "");
      await this.#attempt();
    }
  }

  #readChat({ delta, logprobs, finish_reason: finish }) {
    const { node } = this;
    if (delta?.reasoning_content) {
      this.#piece();
      node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
    }
    if (delta?.content) {
      this.#piece();
      node.content += delta.content;
    }
    if (logprobs) this.#keep(fromChat(logprobs));
    for (const part of delta?.tool_calls ?? []) {
      this.#piece();
      const calls = (node.calls ??= []);
      const call = (calls[part.index] ??= { id: part.id, name: part.function.name, arguments: "" });
      call.arguments += part.function.arguments ?? "";
    }
    if (finish) node.finish = finish;
  }

  #readCompletion({ text, logprobs, finish_reason: finish }) {
    if (text) {
      this.#piece();
      this.node.content += text;
    }
    if (logprobs) this.#keep(fromCompletion(logprobs));
    if (finish) this.node.finish = finish;
  }

  #keep(tokens) {
    (this.node.tokens ??= []).push(...tokens);
  }

  #piece() {
    if (this.pieces === 0) {
      this.firstAt = performance.now();
      this.phase = "writing";
    }
    this.pieces += 1;
  }

  #showProgress(progress) {
    this.phase = "prompt";
    this.progress = progress;
  }

  #count(usage, timings) {
    this.node.stats = {
      prompt: usage.prompt_tokens,
      cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
      generated: usage.completion_tokens,
      rate: timings?.predicted_per_second ?? 0,
      first: this.firstAt ? (this.firstAt - this.began) / 1000 : 0,
    };
  }

  /** Wait until the server may have room. */
  async #pause(error) {
    const seconds = error.retryAfter ?? RETRY_S;
    this.phase = "retrying";
    this.retrying = { ...plainError(error), at: Date.now() + seconds * 1000 };
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, seconds * 1000);
      this.retryNow = () => {
        clearTimeout(timer);
        resolve();
      };
      this.changed(this);
    });
    delete this.retrying;
    if (this.abort.signal.aborted) throw new DOMException("aborted", "AbortError");
    this.began = performance.now();
  }
}

/** Tokens of a reply that is written, with their probabilities: the server reads it again. Throws ApiError. */
export async function score(conversation, nodes, reply, offered, signal) {
  const { settings } = conversation;
  const template = hasTemplate(settings.model);
  const { path, body } = scoringOf({ settings, nodes, reply, template, offered });
  let choice;
  try {
    [choice] = (await post(path, body, signal)).choices;
    if (!choice.logprobs) throw new ApiError("The server sent no probabilities.");
  } catch (error) {
    if (error.code !== "chat_template_error" || error.param || !template) throw error;
    withoutTemplate.add(settings.model ?? "");
    return score(conversation, nodes, reply, offered, signal);
  }
  if (template) return within(fromChat(choice.logprobs), 0, reply.content);
  const tokens = fromCompletion(choice.logprobs);
  const length = tokens.reduce((n, token) => n + byteLength(token), 0);
  return within(tokens, length - byteLength(reply), reply.content);
}

/** Tokens that begin within `text`, which begins `start` bytes after the first one. */
function within(tokens, start, text) {
  const end = start + byteLength({ text });
  let at = 0;
  return tokens.filter((token) => {
    const begin = at;
    at += byteLength(token);
    return begin >= start && begin < end;
  });
}

const byteLength = ({ bytes, text, content }) => bytes?.length ?? new TextEncoder().encode(text ?? content).length;

function plainError(error) {
  return {
    title: titleOf(error),
    text: error.message,
    code: error.code ?? null,
    status: error.status ?? null,
    requestId: error.status >= 500 ? error.requestId : null,
  };
}
