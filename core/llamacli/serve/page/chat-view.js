// View of a conversation: its messages, kept at the end while a reply grows.

import { MessageView } from "./message-view.js";
import { path } from "./tree.js";

const NEAR_PX = 60;

export class ChatView {
  /** View in `node`, which scrolls. `replyOf(id)` is the reply that writes a message, or undefined. */
  constructor(node, actions, replyOf) {
    Object.assign(this, { node, actions, replyOf });
    this.list = node.querySelector(".messages");
    this.welcome = node.querySelector(".welcome");
    this.views = new Map();
    this.waiting = new Set();
    this.frame = 0;
    this.sticks = true;
    node.addEventListener("scroll", () => {
      this.sticks = node.scrollHeight - node.scrollTop - node.clientHeight < NEAR_PX;
    }, { passive: true });
  }

  /** Show a conversation, or its present branch after a change. */
  show(conversation) {
    if (conversation !== this.conversation) {
      this.views.clear();
      this.waiting.clear();
      this.conversation = conversation;
      this.sticks = true;
    }
    const nodes = path(conversation);
    for (const id of this.views.keys()) if (!nodes.some((node) => node.id === id)) this.views.delete(id);
    for (const node of nodes) if (!this.views.has(node.id)) this.views.set(node.id, new MessageView(conversation, node, this.actions));
    const wanted = nodes.map(({ id }) => this.views.get(id).node);
    // Nodes that stay are not moved: that would take the focus from them.
    wanted.forEach((node, i) => {
      if (this.list.children[i] !== node) this.list.insertBefore(node, this.list.children[i] ?? null);
    });
    while (this.list.children.length > wanted.length) this.list.lastElementChild.remove();
    this.welcome.hidden = wanted.length > 0;
    for (const { id } of nodes) this.update(id);
    this.follow();
  }

  /** Show what has changed in a message, in the next frame. */
  update(id) {
    if (!this.views.has(id)) return;
    this.waiting.add(id);
    this.frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.frame = 0;
    const ids = [...this.waiting];
    this.waiting.clear();
    for (const id of ids) {
      const view = this.views.get(id);
      if (view && !view.refresh(this.replyOf(id) ?? null)) this.waiting.add(id);
    }
    if (this.waiting.size) this.frame = requestAnimationFrame(() => this.#draw());
    if (this.sticks) this.node.scrollTop = this.node.scrollHeight;
  }

  /** Scroll to the end, and stay there. */
  follow() {
    this.sticks = true;
    this.node.scrollTop = this.node.scrollHeight;
  }
}
