// View of a reply's tokens: colours by probability, and the alternatives of the chosen token.

import { el, iconButton } from "./dom.js";
import { alternatives, join, level, percent, visible } from "./tokens.js";

const SLICE = 400; // tokens shown in one frame

export class ProbabilityView {
  /**
   * View of tokens in `node`.
   *
   * `goOn(text)` begins a branch with this text; `refusal` says why that is not possible, or is "".
   */
  constructor(tokens, { goOn, refusal = "" }) {
    Object.assign(this, { tokens, goOn, refusal });
    this.active = 0;
    this.spans = [];
    this.text = el("div", {
      className: "tokens",
      role: "listbox",
      tabIndex: 0,
      aria: { label: "Tokens with their probabilities. Arrow keys move, Enter shows alternatives." },
      on: {
        click: (event) => {
          const index = event.target.dataset.index;
          if (index !== undefined) this.select(Number(index));
        },
        keydown: (event) => this.#key(event),
        focus: () => this.#mark(this.active),
      },
    });
    this.card = el("div", { className: "token-card", hidden: true, role: "group", aria: { label: "Alternatives" } });
    this.card.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.close();
    });
    const legend = el("div", { className: "legend", aria: { hidden: "true" } }, "certain",
      [1, 2, 3, 4, 5].map((n) => el("span", { className: `p${n}` })), "improbable");
    this.node = el("div", { className: "probabilities" }, this.text, this.card, legend);
    this.#fill();
  }

  #fill() {
    const from = this.spans.length;
    const made = this.tokens.slice(from, from + SLICE).map((token, i) =>
      el("span", { className: `p${level(token.logprob)}`, role: "option", id: `token-${from + i}`,
        title: percent(token.logprob), data: { index: from + i }, aria: { selected: "false" } },
      token.bytes ? "�" : token.text),
    );
    this.text.append(...made);
    this.spans.push(...made);
    if (this.spans.length < this.tokens.length) requestAnimationFrame(() => this.#fill());
  }

  #key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (step) {
      event.preventDefault();
      this.#mark(Math.max(0, Math.min(this.tokens.length - 1, this.active + step)));
      if (!this.card.hidden) this.select(this.active);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.select(this.active);
      (this.card.querySelector("button.alternative:enabled") ?? this.card.querySelector("button")).focus();
    } else if (event.key === "Escape" && !this.card.hidden) {
      event.stopPropagation();
      this.close();
    }
  }

  #mark(index) {
    this.spans[this.active]?.setAttribute("aria-selected", "false");
    this.active = index;
    const span = this.spans[index];
    if (!span) return;
    span.setAttribute("aria-selected", "true");
    this.text.setAttribute("aria-activedescendant", span.id);
    span.scrollIntoView({ block: "nearest" });
  }

  /** Show the alternatives of a token. */
  select(index) {
    this.#mark(index);
    const token = this.tokens[index];
    const rows = alternatives(token).map((other) => this.#row(index, other));
    const title = el("strong", {}, `“${visible(token.text)}” `, el("span", { className: "muted" }, percent(token.logprob)));
    const head = el("div", { className: "token-head" }, title, iconButton("close", "Close the alternatives", () => this.close()));
    const note = this.refusal && el("p", { className: "muted" }, this.refusal);
    this.card.replaceChildren(head, el("ul", {}, rows), note || "");
    this.card.hidden = false;
    const span = this.spans[index].getClientRects()[0];
    const box = this.node.getBoundingClientRect();
    const left = Math.max(0, Math.min(span.left - box.left, box.width - this.card.offsetWidth));
    this.card.style.left = `${left}px`;
    this.card.style.top = `${span.bottom - box.top + 6}px`;
  }

  close() {
    this.card.hidden = true;
    this.text.focus();
  }

  #row(index, other) {
    const text = join([...this.tokens.slice(0, index), other]);
    const bar = el("span", { className: "bar" });
    bar.style.width = `${Math.max(1, Math.exp(other.logprob) * 100)}%`;
    const content = [
      el("span", { className: "piece" }, visible(other.text)),
      el("span", { className: "track" }, bar),
      el("span", { className: "share" }, percent(other.logprob)),
    ];
    if (other.chosen) return el("li", { className: "alternative chosen" }, content, el("span", { className: "go" }, "chosen"));
    const reason = this.refusal || (text === null ? "This token is only a part of a character." : "");
    const button = el("button", {
      type: "button", className: "alternative", disabled: Boolean(reason), title: reason || "Go on from here with this token",
      aria: { label: `Go on from here with ${visible(other.text)}, ${percent(other.logprob)}` },
      on: { click: () => this.goOn(text, index, other) },
    }, content, el("span", { className: "go" }, "go on"));
    return el("li", {}, button);
  }
}
