// View of one message: text, reasoning, tool calls, state, actions.

import { copyText, count, el, icon, iconButton, textButton } from "./dom.js";
import { MarkdownView } from "./markdown-view.js";
import { ProbabilityView } from "./probabilities.js";
import { siblings } from "./tree.js";

const ROLES = { user: "You", assistant: "Assistant", tool: "Result of a tool" };

export class MessageView {
  /** View of the message `node`; `actions` are those of the chat. */
  constructor(conversation, node, actions) {
    Object.assign(this, { conversation, message: node, actions });
    const label = ROLES[node.role];
    this.body = el("div", { className: "body" });
    this.state = el("div", { className: "state" });
    this.footer = el("div", { className: "footer" });
    this.node = el("article", { className: `message ${node.role}`, data: { id: node.id }, aria: { label } },
      el("h2", { className: "visually-hidden" }, node.role === "tool" ? `${label} ${node.name}` : label),
      this.body, this.state, this.footer);
    if (node.role === "assistant") {
      this.content = el("div", { className: "markdown" });
      this.markdown = new MarkdownView(this.content);
      this.calls = el("div", { className: "calls" });
      this.body.append(this.content, this.calls);
    }
    this.refresh(null);
  }

  /** Show the message again; `reply` is the one that is writing it, or null. Returns true when all is shown. */
  refresh(reply) {
    const { role } = this.message;
    const done = role === "assistant" ? this.#showReply(reply) : this.#showText();
    if (!this.editing) this.#showFooter(reply);
    return done;
  }

  #showText() {
    if (this.editing || this.shown === this.message.content) return true;
    this.shown = this.message.content;
    const { content, files = [], role, name } = this.message;
    const chips = files.map((file) => file.image ? picture(file) : file.audio ? player(file) :
      el("details", { className: "attachment" },
        el("summary", {}, icon("clip"), `${file.name} `, el("span", { className: "muted" }, size(file.text))),
        el("pre", { tabIndex: 0 }, file.text.length > 20_000 ? `${file.text.slice(0, 20_000)}…` : file.text)));
    const text = el("div", { className: "plain" }, content);
    const heading = role === "tool" && el("div", { className: "tool-name" }, icon("tool"), name);
    this.body.replaceChildren(...chips, ...(heading ? [heading] : []), ...(content ? [text] : []));
    return true;
  }

  #showReply(reply) {
    const { message } = this;
    const writing = Boolean(reply) && reply.phase !== "done";
    this.node.classList.toggle("writing", writing);
    let done = true;
    if (message.reasoning) done = this.#showReasoning(writing);
    if (this.probabilities) return done;
    done = this.markdown.update(message.content, !writing) && done;
    this.#showCalls();
    this.#showState(reply);
    return done;
  }

  #showReasoning(writing) {
    if (!this.reasoning) {
      const text = el("div", { className: "markdown" });
      this.reasoning = { view: new MarkdownView(text), title: el("summary") };
      this.body.prepend(el("details", { className: "reasoning" }, this.reasoning.title, text));
    }
    const thinking = writing && !this.message.content && !this.message.calls;
    const title = thinking ? "Thinking…" : "Reasoning";
    if (this.reasoning.title.textContent !== title) this.reasoning.title.textContent = title;
    return this.reasoning.view.update(this.message.reasoning, !thinking);
  }

  #showCalls() {
    const calls = this.message.calls ?? [];
    const waiting = this.message.finish !== undefined && this.message.children.length === 0;
    const key = JSON.stringify([calls, waiting]);
    if (key === this.shownCalls) return;
    this.shownCalls = key;
    const fields = [];
    const cards = calls.map((call, i) => {
      const card = el("div", { className: "call" },
        el("div", { className: "tool-name" }, icon("tool"), call.name), el("pre", { tabIndex: 0 }, pretty(call.arguments)));
      if (waiting) {
        const field = el("textarea", { rows: 2, id: `result-${this.message.id}-${i}`, placeholder: "What the tool returns", className: "mono" });
        fields.push(field);
        card.append(el("label", { htmlFor: field.id }, `Result of ${call.name}`), field);
        if (this.actions.runs(call)) card.append(this.#runButton(call, field));
      }
      return card;
    });
    const send = () => this.actions.sendResults(this.message, fields.map((field) => field.value));
    if (waiting && calls.length) cards.push(textButton(calls.length > 1 ? "Send the results" : "Send the result", send, { className: "button primary" }));
    this.calls.replaceChildren(...cards);
  }

  /** Button that runs a tool of the server, and puts its result into the field. */
  #runButton(call, field) {
    const button = textButton("Run on the server", async () => {
      button.disabled = true;
      try {
        const result = await this.actions.run(call);
        field.value = result.plain_text_response ?? JSON.stringify(result);
      } catch (error) {
        field.value = JSON.stringify({ error: error.message });
      }
      button.disabled = false;
    });
    return button;
  }

  #showState(reply) {
    const { message } = this;
    const key = reply && reply.phase !== "done" ? `${reply.phase} ${reply.retrying?.at ?? ""}` : JSON.stringify([message.state, message.error, message.finish]);
    if (key !== this.shownState) {
      this.shownState = key;
      clearInterval(this.clock);
      this.state.replaceChildren(...this.#stateOf(reply));
    }
    if (this.bar && reply?.progress) {
      const { total, cache, processed } = reply.progress;
      this.bar.value = processed / total;
      const cached = cache ? `, ${count(cache)} from the cache` : "";
      this.note.textContent = `Reading the prompt: ${count(processed)} of ${count(total)} tokens${cached}`;
    }
  }

  #stateOf(reply) {
    const { message, actions } = this;
    this.bar = this.note = null;
    switch (reply?.phase) {
      case "waiting":
        return [el("p", { className: "muted pulse" }, "Waiting for the server…")];
      case "prompt":
        this.note = el("span", { className: "muted" }, "Reading the prompt…");
        this.bar = el("progress", { max: 1, value: 0, aria: { label: "Progress of the prompt" } });
        return [el("div", { className: "progress" }, this.note, this.bar)];
      case "writing":
        return [];
      case "retrying":
        return [this.#retryCard(reply)];
    }
    if (message.state === "failed") return [this.#errorCard(message.error ?? { title: "Something went wrong", text: "" })];
    if (message.state === "writing") {
      return [this.#note("The page was closed while this reply was written.", this.#goOnButton())];
    }
    if (message.state === "stopped") return [this.#note("Stopped.", message.content && this.#goOnButton())];
    if (message.finish === "length") {
      return [this.#note("The reply has reached its longest length, or the end of the context.", this.#goOnButton())];
    }
    return message.finish && !message.content && !message.calls ? [this.#note("The reply is empty.")] : [];
  }

  #goOnButton() {
    return textButton("Continue", () => this.actions.goOn(this.message), { iconName: "play" });
  }

  #note(text, button = null) {
    return el("div", { className: "note" }, el("span", {}, text), button || "");
  }

  #retryCard(reply) {
    const { title, text, at } = reply.retrying;
    const left = el("span");
    const tick = () => {
      left.textContent = `Trying again in ${Math.max(0, Math.ceil((at - Date.now()) / 1000))} s.`;
    };
    tick();
    this.clock = setInterval(tick, 500);
    const now = textButton("Try now", () => reply.retryNow?.(), { iconName: "retry" });
    return el("div", { className: "error", role: "alert" },
      el("strong", {}, title), el("p", {}, text), el("div", { className: "row" }, now, left));
  }

  #errorCard({ title, text, status, requestId }) {
    const { message, actions } = this;
    const buttons = [
      status === 401 && textButton("Enter the key", () => actions.askKey(message), { className: "button primary" }),
      textButton("Try again", () => actions.retry(message), { iconName: "retry" }),
      message.content && this.#goOnButton(),
    ];
    return el("div", { className: "error", role: "alert" }, el("strong", {}, title), el("p", {}, text),
      requestId && el("p", { className: "muted" }, `Request ${requestId}`), el("div", { className: "row" }, buttons));
  }

  #showFooter(reply) {
    const { message } = this;
    const writing = Boolean(reply) && reply.phase !== "done";
    const { index, ids } = siblings(this.conversation, message.id);
    const rate = writing && reply.rate ? `${reply.rate.toFixed(1)} tokens/s` : "";
    const key = JSON.stringify([writing, index, ids.length, message.stats, rate, Boolean(this.probabilities), this.actions.busy()]);
    if (key === this.shownFooter) return;
    this.shownFooter = key;
    const focused = this.footer.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const parts = [];
    if (ids.length > 1) parts.push(this.#branches(index, ids));
    if (!writing) parts.push(...this.#buttons());
    if (message.role === "assistant") parts.push(el("span", { className: "stats" }, writing ? rate : statistics(message.stats)));
    this.footer.replaceChildren(...parts);
    if (focused) [...this.footer.querySelectorAll("button")].find((one) => one.getAttribute("aria-label") === focused)?.focus();
  }

  #branches(index, ids) {
    const go = (i) => () => this.actions.choose(ids[i]);
    return el("span", { className: "branches", role: "group", aria: { label: "Branches" } },
      iconButton("left", "Previous branch", go(index - 1), { disabled: index === 0 }),
      el("span", { aria: { label: `Branch ${index + 1} of ${ids.length}` } }, `${index + 1}/${ids.length}`),
      iconButton("right", "Next branch", go(index + 1), { disabled: index === ids.length - 1 }));
  }

  #buttons() {
    const { message, actions } = this;
    const busy = actions.busy();
    const copy = iconButton("copy", "Copy", () => copyText(message.content, copy));
    const result = message.content ? [copy] : [];
    if (message.role === "assistant") {
      result.push(iconButton("retry", "Regenerate", () => actions.regenerate(message), { disabled: busy }));
    }
    if (message.role !== "tool") result.push(iconButton("edit", "Edit", () => this.edit(), { disabled: busy }));
    if (message.role === "assistant" && message.content) {
      const shown = Boolean(this.probabilities);
      result.push(iconButton("bars", shown ? "Hide the probabilities" : "Probabilities of the tokens", () => this.toggleProbabilities(),
        { disabled: busy && !shown, aria: { label: shown ? "Hide the probabilities" : "Probabilities of the tokens", pressed: String(shown) } }));
    }
    result.push(iconButton("trash", "Delete from here on", () => actions.remove(message), { disabled: busy }));
    return result;
  }

  /** Show or hide the probabilities of the tokens. */
  async toggleProbabilities() {
    const { message } = this;
    if (this.probabilities) {
      this.probabilities.node.replaceWith(this.content);
      this.probabilities = null;
      this.refresh(null);
      return;
    }
    this.state.replaceChildren(el("p", { className: "muted pulse" }, "Reading the reply's probabilities…"));
    this.shownState = null;
    try {
      const tokens = await this.actions.tokens(message);
      this.probabilities = new ProbabilityView(tokens, {
        goOn: (text, index, token) => this.actions.branchFrom(message, text, tokens.slice(0, index), token),
        refusal: this.actions.goOnRefusal(),
      });
      this.content.replaceWith(this.probabilities.node);
      this.state.replaceChildren();
      this.#showFooter(null);
      this.probabilities.text.focus();
    } catch (error) {
      this.state.replaceChildren(el("div", { className: "error", role: "alert" },
        el("strong", {}, "The probabilities cannot be shown"), el("p", {}, error.message)));
    }
  }

  /** Edit the text in place: a user's message is sent as a new branch, a reply's text becomes one. */
  edit() {
    const { message } = this;
    const user = message.role === "user";
    const field = el("textarea", { value: message.content, rows: 3, aria: { label: "Text of the message" } });
    const end = () => {
      this.editing = false;
      this.shown = undefined;
      form.replaceWith(this.body);
      this.shownFooter = null;
      this.refresh(null);
      [...this.footer.querySelectorAll("button")].find((one) => one.title === "Edit")?.focus();
    };
    const keep = () => {
      const text = field.value.trim();
      end();
      if (text && text !== message.content) this.actions.edit(message, text);
    };
    const form = el("form", {
      className: "edit",
      on: {
        submit: (event) => {
          event.preventDefault();
          keep();
        },
        keydown: (event) => {
          if (event.key === "Escape") {
            event.stopPropagation();
            end();
          } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) keep();
        },
      },
    }, field, el("div", { className: "row" },
      el("button", { type: "submit", className: "button primary" }, user ? "Send as a branch" : "Keep as a branch"),
      textButton("Cancel", end)));
    this.editing = true;
    this.body.replaceWith(form);
    this.footer.replaceChildren();
    field.style.height = `${Math.min(field.scrollHeight + 4, innerHeight * 0.5)}px`;
    field.focus();
  }
}

/** Picture of a message; a click shows it as large as there is room. */
function picture({ name, image }) {
  const button = el("button", { type: "button", className: "picture", title: name, aria: { label: `Enlarge ${name}`, pressed: "false" } },
    el("img", { src: image, alt: name }));
  button.addEventListener("click", () => button.setAttribute("aria-pressed", String(button.classList.toggle("large"))));
  return button;
}

/** Player of a message's sound, with its name. */
function player({ name, audio }) {
  return el("figure", { className: "sound" }, el("audio", { controls: true, src: audio, aria: { label: name } }),
    el("figcaption", { className: "muted" }, name));
}

function size(text) {
  const bytes = text.length;
  return bytes < 1000 ? `${bytes} characters` : `${(bytes / 1000).toFixed(1)} thousand characters`;
}

/** Arguments of a call, indented. Characters that hide text, or turn its direction, are spelled: the user decides by it. */
function pretty(text) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // Not JSON: as it is.
  }
  const spelled = (found) => `\\u${found.codePointAt(0).toString(16).padStart(4, "0")}`;
  return shown.replace(/[^\P{C}\n\t]|[\u2028\u2029]/gu, spelled);
}

/** Numbers of a reply in words. */
export function statistics(stats) {
  if (!stats) return "";
  const parts = [];
  if (stats.rate) parts.push(`${stats.rate.toFixed(1)} tokens/s`);
  if (stats.first) parts.push(`first token after ${stats.first.toFixed(stats.first < 10 ? 2 : 0)} s`);
  if (stats.generated) parts.push(`${count(stats.generated)} tokens`);
  if (stats.prompt) parts.push(`prompt ${count(stats.prompt)}${stats.cached ? `, ${count(stats.cached)} cached` : ""}`);
  return parts.join(" · ");
}
