// The page: conversations, the present one, its replies and its settings.

import { get, key, post, titleOf as titleOfError } from "./api.js";
import { ChatView } from "./chat-view.js";
import { Composer } from "./composer.js";
import { announce, count, el, textButton } from "./dom.js";
import { download } from "./files.js";
import { hasTemplate, Reply, score } from "./reply.js";
import { DEFAULTS } from "./requests.js";
import { SettingsView } from "./settings-view.js";
import { Sidebar } from "./sidebar.js";
import { journal, MemoryStore, recall, remember, Store } from "./store.js";
import { fromJson, toJson, toMarkdown } from "./transfer.js";
import { add, choose, newConversation, path, pathTo, remove, ROOT, titleOf } from "./tree.js";

const SAVE_MS = 1000;
const STARTERS = ["Tell me a story about a fox.", "Explain how a bicycle stays upright.", "Write a Python function that ", "Summarize this text:\n\n"];
const SPOKEN = 600; // characters of a reply that screen readers get at its end

const find = (selector) => document.querySelector(selector);
const narrow = matchMedia("(max-width: 60rem)");

class App {
  replies = new Map(); // by id of the message
  saving = new Map(); // conversations to be saved, with their timers
  saved_ms = 0; // duration of the last save: pictures and sound make it long
  models = [];
  props = {};
  tools = []; // definitions of the tools that the server runs

  async start() {
    const last = location.hash.slice(1);
    this.chat = new ChatView(find("#chat"), this.#actions(), (id) => this.replies.get(id));
    this.composer = new Composer(find("#composer"), {
      send: (text, files) => this.#send(text, files),
      stop: () => this.#running()?.stop(),
      warn: (text) => this.#warn(text),
      lack: (kind) => this.#lack(kind),
    });
    this.settings = new SettingsView(find("#settings-fields"), { changed: (settings) => this.#settingsChanged(settings) });
    this.sidebar = new Sidebar(find("#sidebar"), {
      open: (id) => this.#open(id),
      rename: (id, title) => this.#rename(id, title),
      remove: (id, title) => this.#removeConversation(id, title),
      exportOne: (id) => this.#export([id]),
      exportText: (id) => this.#exportText(id),
      search: (text) => this.store.search(text),
    });
    this.#wire();
    find(".starters").append(...STARTERS.map((text) => el("li", {}, textButton(text, () => this.#begin(text)))));
    this.conversation = this.#fresh();
    this.#show();
    this.composer.field.focus();
    const models = this.#loadModels();
    try {
      this.store = await Store.open();
    } catch (error) {
      this.store = new MemoryStore();
      this.#warn(error.message);
    }
    this.store.onChange((id) => this.#changedElsewhere(id));
    await this.#recover();
    if (last) await this.#open(last, { quiet: true });
    await this.#list();
    await models;
    document.documentElement.dataset.ready = "true";
  }

  // --- conversations

  #begin(text) {
    const { field } = this.composer;
    field.value = text;
    field.dispatchEvent(new Event("input"));
    field.focus();
  }

  #fresh() {
    return newConversation({ ...DEFAULTS, ...recall("settings", {}) });
  }

  async #open(id, { quiet = false } = {}) {
    // A conversation with a running reply is the one in memory, not the saved one.
    const running = [...this.replies.values()].find((reply) => reply.conversation.id === id);
    const loaded = running?.conversation ?? (id === this.conversation.id ? this.conversation : await this.store.load(id));
    if (!loaded) {
      if (!quiet) this.#warn("This conversation is gone.");
      return;
    }
    loaded.settings = { ...DEFAULTS, ...loaded.settings };
    this.conversation = loaded;
    this.#show();
    this.#closeDrawers();
    if (!quiet) this.composer.field.focus();
  }

  #new() {
    if (path(this.conversation).length) this.conversation = this.#fresh();
    this.#show();
    this.#closeDrawers();
    this.composer.field.focus();
  }

  /** Show the present conversation in all parts of the page. */
  #show() {
    const { conversation } = this;
    const kept = path(conversation).length > 0;
    history.replaceState(null, "", kept ? `#${conversation.id}` : location.pathname + location.search);
    document.title = conversation.title ? `${conversation.title} – llamacli` : "llamacli";
    this.chat.show(conversation);
    this.composer.setRunning(Boolean(this.#running()));
    this.settings.show(conversation.settings, this.#defaults());
    this.#showModels();
    if (this.store) this.#list();
  }

  async #list() {
    this.heads = await this.store.heads();
    const running = new Set([...this.replies.values()].map((reply) => reply.conversation.id));
    this.sidebar.show(this.heads, this.conversation.id, running);
  }

  async #rename(id, title) {
    const conversation = id === this.conversation.id ? this.conversation : await this.store.load(id);
    conversation.title = title;
    await this.#save(conversation);
    this.#show();
  }

  async #removeConversation(id, title) {
    if (!(await this.#confirm(`Delete “${title}”?`, "It cannot be brought back.", "Delete"))) return;
    for (const reply of this.replies.values()) if (reply.conversation.id === id) reply.stop();
    clearTimeout(this.saving.get(id)?.timer);
    this.saving.delete(id);
    await this.store.remove(id);
    if (id === this.conversation.id) this.conversation = this.#fresh();
    this.#show();
    announce("Deleted");
  }

  async #export(ids) {
    const all = await Promise.all(ids.map((id) => this.store.load(id)));
    download(`${all.length === 1 ? fileName(all[0]) : "conversations"}.json`, toJson(all));
  }

  async #exportText(id) {
    const conversation = id === this.conversation.id ? this.conversation : await this.store.load(id);
    download(`${fileName(conversation)}.md`, toMarkdown(conversation), "text/markdown");
  }

  async #import(files) {
    let last = null;
    let n = 0;
    for (const file of files) {
      try {
        for (const conversation of fromJson(await file.text())) {
          await this.store.save({ ...conversation, settings: { ...DEFAULTS, ...conversation.settings } });
          last = conversation.id;
          n += 1;
        }
      } catch (error) {
        this.#warn(`${file.name}: ${error.message}`);
      }
    }
    if (last) await this.#open(last);
    await this.#list();
    if (n) announce(`${n} conversations imported`);
  }

  /** Save soon: a reply that grows is saved once a second. */
  #saveSoon(conversation) {
    const pending = this.saving.get(conversation.id);
    if (pending) return;
    const timer = setTimeout(() => this.#save(conversation), Math.max(SAVE_MS, 20 * this.saved_ms));
    this.saving.set(conversation.id, { conversation, timer });
  }

  async #save(conversation) {
    clearTimeout(this.saving.get(conversation.id)?.timer);
    this.saving.delete(conversation.id);
    const began = performance.now();
    try {
      await this.store.save(this.#light(conversation));
      this.saved_ms = performance.now() - began;
    } catch (error) {
      this.#warn(error.message);
    }
  }

  /** Copy of a conversation without the probabilities of replies that are being written: copying them takes time. */
  #light(conversation) {
    const nodes = { ...conversation.nodes };
    for (const { node } of this.replies.values()) {
      if (nodes[node.id] === node) nodes[node.id] = { ...node, tokens: undefined };
    }
    return { ...conversation, nodes };
  }

  /** Texts that were written when the page was left are newer than the database. */
  async #recover() {
    for (const { conversation: id, message, content, reasoning } of journal.take()) {
      const conversation = await this.store.load(id);
      const node = conversation?.nodes[message];
      if (!node || node.state !== "writing") continue;
      if (content.length > node.content.length) node.content = content;
      if (reasoning) node.reasoning = reasoning;
      await this.#save(conversation);
    }
  }

  #leave() {
    const writing = [...this.replies.values()].map(({ conversation, node }) => (
      { conversation: conversation.id, message: node.id, content: node.content, reasoning: node.reasoning }));
    journal.write(writing);
    for (const { conversation } of this.saving.values()) this.#save(conversation);
  }

  async #changedElsewhere(id) {
    await this.#list();
    if (id !== this.conversation.id || this.#running()) return;
    const loaded = await this.store.load(id);
    if (!loaded) return;
    this.conversation = loaded;
    this.#show();
  }

  // --- replies

  #running() {
    return [...this.replies.values()].find((reply) => reply.conversation === this.conversation);
  }

  #send(text, files) {
    const { conversation } = this;
    const last = path(conversation).at(-1);
    add(conversation, last?.id ?? ROOT, { role: "user", content: text, ...(files.length ? { files } : {}) });
    if (!conversation.title) conversation.title = titleOf(conversation);
    this.#reply();
  }

  /** Write a reply after the last message of the branch; `begun` has what it begins with. */
  #reply(begun = {}) {
    const { conversation } = this;
    const last = path(conversation).at(-1);
    this.#write(conversation, add(conversation, last.id, { role: "assistant", state: "writing", ...begun }));
  }

  /** Write, or go on with, the reply in a message. */
  #write(conversation, node) {
    let loaded = !this.models.some(({ id, meta }) => id === conversation.settings.model && !meta.loaded);
    const reply = new Reply({
      conversation,
      node,
      nodes: pathTo(conversation, node.parent),
      offered: this.tools,
      changed: () => {
        if (conversation === this.conversation) this.chat.update(node.id);
        if (!loaded) this.#refreshModels();
        loaded = true;
        this.#saveSoon(conversation);
      },
      ended: () => this.#ended(reply),
    });
    this.replies.set(node.id, reply);
    this.#save(conversation).then(() => this.#list());
    this.#show();
    announce("The reply is being written");
    reply.run();
  }

  async #ended(reply) {
    const { conversation, node } = reply;
    this.replies.delete(node.id);
    conversation.updated = Date.now();
    if (conversation === this.conversation) {
      this.composer.setRunning(false);
      this.#refreshModels();
      for (const { id } of path(conversation)) this.chat.update(id);
      announce(spoken(node));
    }
    await this.#save(conversation);
    this.#list();
    if (node.error?.status === 401) this.#askKey(() => this.#retry(conversation, node));
  }

  /** Try the reply of a message again: in its place if nothing is written, else go on with it in a new branch. */
  #retry(conversation, node) {
    if (conversation !== this.conversation || this.#running()) return;
    if (node.content || node.reasoning || node.calls) this.#regenerate(node);
    else this.#write(conversation, node);
  }

  #regenerate(node) {
    const { conversation } = this;
    const fresh = add(conversation, node.parent, { role: "assistant", state: "writing" });
    this.#write(conversation, fresh);
  }

  #actions() {
    return {
      busy: () => Boolean(this.#running()),
      choose: (id) => {
        choose(this.conversation, id);
        this.#save(this.conversation);
        this.chat.show(this.conversation);
      },
      regenerate: (node) => this.#regenerate(node),
      retry: (node) => this.#retry(this.conversation, node),
      goOn: (node) => this.#write(this.conversation, node),
      askKey: (node) => this.#askKey(() => this.#retry(this.conversation, node)),
      remove: async (node) => {
        if (!(await this.#confirm("Delete this message?", "All messages that follow it are deleted too.", "Delete"))) return;
        remove(this.conversation, node.id);
        await this.#save(this.conversation);
        this.#show();
      },
      edit: (node, text) => {
        const { role, parent, files } = node;
        add(this.conversation, parent, { role, content: text, ...(files ? { files } : {}) });
        if (role === "user") this.#reply();
        else {
          this.#save(this.conversation);
          this.#show();
        }
      },
      sendResults: (node, results) => {
        let parent = node.id;
        node.calls.forEach((call, i) => {
          parent = add(this.conversation, parent, { role: "tool", content: results[i], callId: call.id, name: call.name }).id;
        });
        this.#reply();
      },
      runs: (call) => this.tools.some((tool) => tool.function.name === call.name),
      run: (call) => post("tools", { tool: call.name, params: JSON.parse(call.arguments || "{}") }),
      tokens: async (node) => {
        if (!node.tokens?.length || node.tokens.map(({ text }) => text).join("").length < node.content.length) {
          node.tokens = await score(this.conversation, pathTo(this.conversation, node.parent), node, this.tools);
          this.#save(this.conversation);
        }
        return node.tokens;
      },
      goOnRefusal: () => (this.conversation.settings.schema.trim()
        ? "With a JSON schema a reply cannot be continued: the schema begins with the reply." : ""),
      branchFrom: (node, content, tokens, token) => {
        const { conversation } = this;
        const { reasoning } = node;
        const kept = [...tokens, { ...token, top: alternativesOf(node, tokens.length) }];
        const fresh = add(conversation, node.parent, { role: "assistant", state: "writing", content, tokens: kept, ...(reasoning ? { reasoning } : {}) });
        this.#write(conversation, fresh);
      },
    };
  }

  // --- models and settings

  async #loadModels() {
    try {
      this.models = (await get("v1/models")).data;
      this.props = await get("props");
      this.tools = (await get("tools")).map(({ definition }) => definition);
      this.settings.offer(this.tools.map((tool) => tool.function.name));
    } catch (error) {
      if (error.status === 401) {
        this.#askKey(() => this.#loadModels());
        return;
      }
      this.#warn(`${titleOfError(error)}: ${error.message}`, () => this.#loadModels());
      return;
    }
    this.#showModels();
    this.settings.show(this.conversation.settings, this.#defaults(), this.props.sampling_parameters);
  }

  /** Ask the server again which models are loaded; without an answer the list stays. */
  async #refreshModels() {
    try {
      this.models = (await get("v1/models")).data;
    } catch {
      return;
    }
    this.#showModels();
  }

  /** Reason why the model takes no "image" or "audio"; "" if it does, or if that is not known before it is loaded. */
  #lack(kind) {
    const model = this.models.find(({ id }) => id === this.conversation.settings.model);
    if (!model?.meta.loaded || model.architecture.input_modalities.includes(kind)) return "";
    const [does, what] = kind === "image" ? ["see", "pictures"] : ["hear", "sound"];
    return `The model ${model.id} does not ${does}: it has no encoder of ${what} (a mmproj file).`;
  }

  #defaults() {
    const { model } = this.conversation.settings;
    const known = !model || model === this.props.model_alias;
    return known ? (this.props.default_generation_settings?.params ?? {}) : {};
  }

  #showModels() {
    const select = find("#model");
    const { settings } = this.conversation;
    const ids = this.models.map(({ id }) => id);
    select.replaceChildren(...this.models.map(({ id, meta }) => el("option", { value: id }, meta.loaded ? id : `${id} (not loaded)`)));
    select.disabled = ids.length === 0;
    if (ids.length && !ids.includes(settings.model)) settings.model = ids[0];
    select.value = settings.model ?? "";
    const meta = this.models.find(({ id }) => id === settings.model)?.meta;
    find("#context").textContent = meta?.n_ctx ? `${count(meta.n_ctx)} tokens of context` : "";
    find("#no-template").hidden = hasTemplate(settings.model);
  }

  #settingsChanged(settings) {
    this.conversation.settings = settings;
    remember("settings", settings);
    if (path(this.conversation).length) this.#saveSoon(this.conversation);
  }

  // --- dialogs and panels

  #askKey(then) {
    const dialog = find("#key-dialog");
    if (dialog.open) return;
    const field = dialog.querySelector("input");
    dialog.querySelector(".key-note").textContent = key.get()
      ? "The server does not accept this key." : "This server asks for an API key: a word that its owner gives you.";
    field.value = key.get();
    dialog.onclose = () => {
      if (dialog.returnValue !== "ok") return;
      key.set(field.value.trim());
      if (!this.models.length) this.#loadModels();
      then();
    };
    dialog.returnValue = "";
    dialog.showModal();
    field.select();
  }

  #confirm(title, text, action) {
    const dialog = find("#confirm-dialog");
    dialog.querySelector("h2").textContent = title;
    dialog.querySelector("p").textContent = text;
    dialog.querySelector("[value=ok]").textContent = action;
    dialog.returnValue = "";
    dialog.showModal();
    return new Promise((resolve) => {
      dialog.onclose = () => resolve(dialog.returnValue === "ok");
    });
  }

  /** Show a warning, with a button that tries again if `retry` is given. */
  #warn(text, retry = null) {
    const note = el("div", { className: `toast ${retry ? "" : "fades"}`, role: "alert" }, el("span", {}, text));
    note.addEventListener("animationend", () => note.remove());
    const close = () => note.remove();
    if (retry) note.append(el("button", { type: "button", className: "button", on: { click: () => { close(); retry(); } } }, "Try again"));
    note.append(el("button", { type: "button", className: "button", on: { click: close } }, "Close"));
    find("#toasts").append(note);
  }

  #toggle(panel, button) {
    const name = `${panel}-open`;
    const open = !document.documentElement.classList.contains(name);
    if (open && narrow.matches) this.#closeDrawers();
    this.#setPanel(panel, open);
    if (!narrow.matches) remember(name, open);
    if (open) find(`#${panel}`).querySelector("input, textarea, button")?.focus();
    else find(button).focus();
  }

  #setPanel(panel, open) {
    document.documentElement.classList.toggle(`${panel}-open`, open);
    find(`#${panel}`).inert = !open;
    find(`[aria-controls=${panel}]`).setAttribute("aria-expanded", String(open));
    find("#shade").hidden = !narrow.matches || !(this.#isOpen("sidebar") || this.#isOpen("settings"));
  }

  #isOpen(panel) {
    return document.documentElement.classList.contains(`${panel}-open`);
  }

  #closeDrawers() {
    if (!narrow.matches) return;
    this.#setPanel("sidebar", false);
    this.#setPanel("settings", false);
  }

  #arrange() {
    this.#setPanel("sidebar", !narrow.matches && recall("sidebar-open", true));
    this.#setPanel("settings", !narrow.matches && recall("settings-open", false));
  }

  #wire() {
    this.#arrange();
    narrow.addEventListener("change", () => this.#arrange());
    const click = (selector, action) => find(selector).addEventListener("click", action);
    click("#show-sidebar", () => this.#toggle("sidebar", "#show-sidebar"));
    click("#show-settings", () => this.#toggle("settings", "#show-settings"));
    click("#close-settings", () => this.#toggle("settings", "#show-settings"));
    click("#shade", () => this.#closeDrawers());
    click("#new", () => this.#new());
    click("#theme", () => this.#nextTheme());
    click("#export", () => this.#export(this.heads.map(({ id }) => id)));
    click("#import", () => find("#import-file").click());
    click("#key-cancel", () => find("#key-dialog").close(""));
    click("#help", () => find("#help-dialog").showModal());
    find("#import-file").addEventListener("change", async (event) => {
      await this.#import([...event.target.files]);
      event.target.value = "";
    });
    find("#model").addEventListener("change", (event) => {
      this.#settingsChanged({ ...this.conversation.settings, model: event.target.value });
      this.#show();
    });
    document.addEventListener("keydown", (event) => this.#key(event));
    addEventListener("pagehide", () => this.#leave());
    addEventListener("hashchange", () => this.#open(location.hash.slice(1), { quiet: true }));
    this.#wireDrop();
  }

  #wireDrop() {
    const page = document.documentElement;
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      page.classList.add("dropping");
    });
    addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) page.classList.remove("dropping");
    });
    addEventListener("drop", (event) => {
      page.classList.remove("dropping");
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.composer.attach(event.dataTransfer.files);
    });
  }

  #key(event) {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
      if (narrow.matches && (this.#isOpen("sidebar") || this.#isOpen("settings"))) this.#closeDrawers();
      else this.#running()?.stop();
    } else if (event.altKey && !event.ctrlKey && !event.metaKey) {
      const actions = {
        KeyN: () => this.#new(),
        KeyS: () => this.#toggle("settings", "#show-settings"),
        KeyB: () => this.#toggle("sidebar", "#show-sidebar"),
      };
      if (!actions[event.code]) return;
      event.preventDefault();
      actions[event.code]();
    } else if (event.key === "/" && !typing) {
      event.preventDefault();
      this.composer.field.focus();
    }
  }

  #nextTheme() {
    const order = ["auto", "light", "dark"];
    const theme = order[(order.indexOf(recall("theme", "auto")) + 1) % 3];
    remember("theme", theme);
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    const names = { auto: "as the system's", light: "light", dark: "dark" };
    announce(`Colours: ${names[theme]}`);
    find("#theme").title = `Colours: ${names[theme]}`;
  }
}

function fileName({ title }) {
  return (title || "").replace(/[^\p{L}\p{N} _-]+/gu, "").trim() || "conversation";
}

function alternativesOf(node, index) {
  return node.tokens[index]?.top ?? [];
}

/** Text for screen readers at the end of a reply. */
function spoken(node) {
  if (node.error) return `${node.error.title}. ${node.error.text}`;
  if (node.calls?.length) return `The model calls ${node.calls.map(({ name }) => name).join(", ")}`;
  const text = node.content.length > SPOKEN ? `${node.content.slice(0, SPOKEN)}…` : node.content;
  return `${node.state === "stopped" ? "Stopped" : "Reply"}: ${text}`;
}

new App().start();
