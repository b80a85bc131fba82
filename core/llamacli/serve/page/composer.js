// Field for the next message, with files, and the button that sends or stops.

import { announce, el, icon, iconButton } from "./dom.js";
import { kindOf, read } from "./files.js";

const MEDIA = { image: "picture", audio: "sound" };

export class Composer {
  /**
   * Composer in the form `node`. `send(text, files)` and `stop()` are called by the button; `warn(text)` for bad files.
   * `lack(kind)` says why the model takes no files of a kind, "image" or "audio"; "" if it does.
   */
  constructor(node, { send, stop, warn, lack }) {
    Object.assign(this, { node, send, stop, warn, lack, files: [], running: false });
    this.field = node.querySelector("textarea");
    this.chips = node.querySelector(".chips");
    this.button = node.querySelector(".send");
    const input = node.querySelector("input[type=file]");
    node.querySelector(".attach").addEventListener("click", () => input.click());
    input.addEventListener("change", async () => {
      await this.attach(input.files);
      input.value = "";
    });
    node.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.field.addEventListener("input", () => this.#changed());
    this.field.addEventListener("keydown", (event) => {
      // While an input method composes a character, Enter belongs to it.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.submit();
    });
    this.field.addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.attach(event.clipboardData.files);
    });
    this.#changed();
  }

  submit() {
    if (this.running) {
      this.stop();
      return;
    }
    const text = this.field.value.trim();
    if (!text && !this.files.length) return;
    for (const [kind, name] of Object.entries(MEDIA)) {
      const reason = this.files.some((file) => file[kind]) && this.lack(kind);
      if (reason) {
        this.warn(`${reason} Remove the ${name}, or choose another model.`);
        return;
      }
    }
    const files = this.files;
    this.field.value = "";
    this.files = [];
    this.#changed();
    this.send(text, files);
  }

  /** Attach files of text, pictures and sound. */
  async attach(files) {
    for (const file of files) {
      try {
        const reason = kindOf(file) in MEDIA && this.lack(kindOf(file));
        if (reason) throw new Error(`${file.name} is not attached. ${reason}`);
        this.files.push(await read(file));
        announce(`${file.name} is attached`);
      } catch (error) {
        this.warn(error.message);
      }
    }
    this.#changed();
    this.field.focus();
  }

  /** Show the button for sending, or for stopping. */
  setRunning(running) {
    this.running = running;
    this.#changed();
  }

  #changed() {
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight, innerHeight * 0.4)}px`;
    this.chips.replaceChildren(...this.files.map((file) => el("li", { className: "chip" },
      file.image && el("img", { src: file.image, alt: "" }), file.name,
      iconButton("close", `Remove ${file.name}`, () => {
        this.files = this.files.filter((other) => other !== file);
        this.#changed();
        this.field.focus();
      }))));
    this.chips.hidden = this.files.length === 0;
    const label = this.running ? "Stop the reply" : "Send";
    if (this.button.title !== label) {
      this.button.title = label;
      this.button.setAttribute("aria-label", label);
      this.button.replaceChildren(icon(this.running ? "stop" : "send"));
    }
    this.button.classList.toggle("running", this.running);
    this.button.disabled = !this.running && !this.field.value.trim() && !this.files.length;
  }
}
