// Field for the next message, with files, and the button that sends or stops.

import { announce, el, icon, iconButton } from "./dom.js";
import { isPicture, readPicture, readText } from "./files.js";

export class Composer {
  /**
   * Composer in the form `node`. `send(text, files)` and `stop()` are called by the button; `warn(text)` for bad files.
   * `blindness()` says why the model takes no pictures, "" if it does.
   */
  constructor(node, { send, stop, warn, blindness }) {
    Object.assign(this, { node, send, stop, warn, blindness, files: [], running: false });
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
    const reason = this.files.some(({ image }) => image) && this.blindness();
    if (reason) {
      this.warn(`${reason} Remove the picture, or choose another model.`);
      return;
    }
    const files = this.files;
    this.field.value = "";
    this.files = [];
    this.#changed();
    this.send(text, files);
  }

  /** Attach files of text and pictures. */
  async attach(files) {
    for (const file of files) {
      try {
        const reason = isPicture(file) && this.blindness();
        if (reason) throw new Error(`${file.name} is not attached. ${reason}`);
        this.files.push(await (isPicture(file) ? readPicture : readText)(file));
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
