// Panel of settings: they belong to the conversation, and a new one begins with the last.

import { el, textButton } from "./dom.js";
import { groupsOf, LIMITS, LISTS, parse } from "./parameters.js";
import { schemaOf, toolsOf } from "./requests.js";
import { recall, remember } from "./store.js";

const TOOLS_EXAMPLE = `[
  {
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {
      "type": "object",
      "properties": {"city": {"type": "string"}},
      "required": ["city"]
    }
  }
]`;
const SCHEMA_EXAMPLE = `{
  "type": "object",
  "properties": {"answer": {"type": "string"}},
  "required": ["answer"]
}`;

const REASONING = "Reasoning"; // the group of parameters that are shown below the choice of this name

export class SettingsView {
  /** Panel in `node`; `changed(settings)` is called for each valid change. */
  constructor(node, { changed }) {
    Object.assign(this, { node, changed, defaults: {}, table: [], offered: [] });
  }

  /** Names of the tools that the server runs; `show` shows them. */
  offer(names) {
    this.offered = names;
  }

  /** Show settings. `defaults` are the server's values of sampling parameters by name, `table` describes them. */
  show(settings, defaults = this.defaults, table = this.table) {
    Object.assign(this, { settings, defaults, table });
    const open = new Set([...this.node.querySelectorAll("details[open]")].map((group) => group.dataset.title));
    const section = (title, ...fields) => {
      const group = el("details", { data: { title }, open: open.has(title) }, el("summary", {}, title), fields);
      const isSet = fields.some((field) => field.dataset?.set === "true");
      if (isSet) group.firstChild.append(el("span", { className: "dot", role: "img", aria: { label: "changed" } }));
      return group;
    };
    const groups = groupsOf(table);
    const [reasoning] = groups.filter(({ title }) => title === REASONING);
    this.node.replaceChildren(
      this.#text("system", "System prompt", "What the model should know or be, before the conversation.", { rows: 4 }),
      this.#prompts(),
      this.#choice("reasoning", REASONING, "For models that think before they answer.",
        [["", "The model's default"], ["none", "Off"], ["low", "Low"], ["medium", "Medium"], ["high", "High"]]),
      ...(reasoning?.parameters ?? []).map((one) => this.#parameter(one)),
      this.#switch("probabilities", "Probabilities with each reply", "Click a token of a reply to see what else could have come."),
      section("Length and end", ...LIMITS.map((parameter) => this.#parameter(parameter))),
      ...[...groups.filter((group) => group !== reasoning), { title: "Order and bias", parameters: LISTS }].map(
        ({ title, parameters }) => section(title, ...parameters.map((one) => this.#parameter(one)))),
      section("JSON schema", this.#text("schema", "Schema of the reply", "The reply is JSON that is valid by this schema.",
        { rows: 8, code: true, check: schemaOf, example: SCHEMA_EXAMPLE })),
      section("Tools",
        ...(this.offered.length
          ? [this.#switch("serverTools", "Tools of the server", `You run each call by a button: ${this.offered.join(", ")}.`)] : []),
        this.#text("tools", "Functions that the model may call", "A JSON list. You type in the results.",
          { rows: 8, code: true, check: toolsOf, example: TOOLS_EXAMPLE }),
        this.#choice("toolChoice", "Calls", "", [["auto", "Where the model wants"], ["required", "Always"], ["none", "Never"]])),
      el("button", { type: "button", className: "button wide", on: { click: () => this.#reset() } }, "Reset all settings"),
    );
  }

  /** Saved system prompts: choose one, keep or delete the present one. */
  #prompts() {
    const kept = recall("prompts", []);
    const label = (text) => (text.length > 40 ? `${text.slice(0, 40)}…` : text);
    const list = el("select", { aria: { label: "Saved system prompts" } },
      el("option", { value: "" }, "Saved prompts"),
      kept.map((text, i) => el("option", { value: String(i) }, label(text))));
    list.value = kept.includes(this.settings.system) ? String(kept.indexOf(this.settings.system)) : "";
    list.addEventListener("change", () => {
      if (list.value) this.#set("system", kept[Number(list.value)]);
      this.show(this.settings);
    });
    const keep = (texts) => {
      remember("prompts", texts);
      this.show(this.settings);
    };
    const others = () => recall("prompts", []).filter((text) => text !== this.settings.system);
    const save = textButton("Save", () => this.settings.system.trim() && keep([...others(), this.settings.system]));
    const remove = textButton("Delete", () => keep(others()));
    list.hidden = !kept.length;
    remove.hidden = !list.value;
    return el("div", { className: "field row" }, list, save, remove);
  }

  #reset() {
    const { model } = this.settings;
    this.changed({ ...this.settings, system: "", params: {}, schema: "", tools: "", toolChoice: "auto", serverTools: true, reasoning: "", probabilities: false, model });
    this.show(this.settings);
  }

  #set(name, value) {
    this.settings[name] = value;
    this.changed(this.settings);
  }

  #field(id, label, hint, input, isSet = false) {
    const error = el("p", { className: "field-error", id: `${id}-error`, hidden: true });
    const note = el("p", { className: "hint", id: `${id}-hint` }, hint);
    input.id = id;
    input.setAttribute("aria-describedby", `${id}-hint ${id}-error`);
    const field = el("div", { className: "field", data: { set: String(isSet) } }, el("label", { htmlFor: id }, label), input, hint && note, error);
    field.fail = (message) => {
      error.textContent = message;
      error.hidden = !message;
      input.setAttribute("aria-invalid", String(Boolean(message)));
    };
    return field;
  }

  #text(name, label, hint, { rows, code = false, check = null, example = "" }) {
    const input = el("textarea", { rows, spellcheck: !code, className: code ? "mono" : "", value: this.settings[name], placeholder: example });
    const field = this.#field(`set-${name}`, label, hint, input, Boolean(this.settings[name]));
    const validate = () => {
      try {
        check?.(input.value);
        field.fail("");
      } catch (error) {
        field.fail(error.message);
      }
    };
    input.addEventListener("input", () => this.#set(name, input.value));
    input.addEventListener("change", validate);
    validate();
    return field;
  }

  #choice(name, label, hint, options) {
    const input = el("select", {}, options.map(([value, text]) => el("option", { value }, text)));
    input.value = this.settings[name];
    input.addEventListener("change", () => this.#set(name, input.value));
    return this.#field(`set-${name}`, label, hint, input);
  }

  #switch(name, label, hint) {
    const input = el("input", { type: "checkbox", role: "switch", checked: this.settings[name] });
    input.addEventListener("change", () => this.#set(name, input.checked));
    const field = this.#field(`set-${name}`, label, hint, input);
    field.classList.add("switch");
    return field;
  }

  #parameter(parameter) {
    const { name, label, meaning, kind, min, max, whole } = parameter;
    const value = this.settings.params[name];
    const usual = this.defaults[name];
    const id = `param-${name}`;
    let input;
    if (kind === "switch") input = el("input", { type: "checkbox", role: "switch", checked: Boolean(value) });
    else if (kind === "lines") input = el("textarea", { rows: 2, value: (value ?? []).join("\n"), className: "mono" });
    else if (kind === "json") {
      const shown = usual === undefined ? "" : JSON.stringify(usual);
      input = el("textarea", { rows: 2, className: "mono", value: value === undefined ? "" : JSON.stringify(value), placeholder: shown });
    } else {
      input = el("input", {
        type: "number", inputMode: whole ? "numeric" : "decimal", min, max, step: "any",
        value: value ?? "", placeholder: usual === undefined ? "" : `${Number(usual.toPrecision(6))}`,
      });
    }
    const field = this.#field(id, label, meaning, input, value !== undefined);
    if (kind === "switch") field.classList.add("switch");
    else if (!kind) field.classList.add("number");
    input.addEventListener(kind === "switch" ? "change" : "input", () => {
      let parsed;
      field.fail("");
      try {
        if (input.validity.badInput) throw new Error(`${label} must be a number.`);
        parsed = parse(parameter, kind === "switch" ? input.checked : input.value);
      } catch (error) {
        field.fail(`${error.message} The default is used.`);
      }
      const { [name]: _, ...rest } = this.settings.params;
      this.#set("params", parsed === undefined ? rest : { ...rest, [name]: parsed });
      field.dataset.set = String(parsed !== undefined);
    });
    return field;
  }
}
