// Conversations in the browser's database (IndexedDB), and small things in localStorage.
//
// Heads (title, time) and bodies are apart, so that the list does not read all texts.

import { contains } from "./tree.js";

const NAME = "llamacli";
const JOURNAL = "llamacli-journal";

/** Error of storage, in words. */
export class StoreError extends Error {}

export class Store {
  #database;
  #channel = new BroadcastChannel(NAME);

  /** Open the database. Throws StoreError. */
  static async open() {
    const store = new Store();
    try {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => {
        request.result.createObjectStore("heads", { keyPath: "id" });
        request.result.createObjectStore("bodies", { keyPath: "id" });
      };
      store.#database = await done(request);
    } catch (error) {
      throw new StoreError(`This browser keeps nothing for this page (${error.message}): conversations end with the tab.`);
    }
    return store;
  }

  /** Heads of all conversations, latest first. */
  async heads() {
    const heads = await done(this.#database.transaction("heads").objectStore("heads").getAll());
    return heads.sort((a, b) => b.updated - a.updated);
  }

  /** Conversation of an id, or undefined. */
  async load(id) {
    return done(this.#database.transaction("bodies").objectStore("bodies").get(id));
  }

  /** Keep a conversation. Throws StoreError. */
  async save(conversation) {
    const { id, title, updated } = conversation;
    await this.#write((heads, bodies) => {
      heads.put({ id, title, updated });
      bodies.put(conversation);
    });
    this.#channel.postMessage(id);
  }

  /** Delete a conversation. */
  async remove(id) {
    await this.#write((heads, bodies) => {
      heads.delete(id);
      bodies.delete(id);
    });
    this.#channel.postMessage(id);
  }

  /** Ids of the conversations that have a text. */
  async search(text) {
    const found = new Set();
    const request = this.#database.transaction("bodies").objectStore("bodies").openCursor();
    return new Promise((resolve, reject) => {
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        const cursor = request.result;
        if (!cursor) return resolve(found);
        if (contains(cursor.value, text)) found.add(cursor.value.id);
        return cursor.continue();
      };
    });
  }

  /** Call a function with the id of each conversation that another tab changes. */
  onChange(listener) {
    this.#channel.onmessage = ({ data }) => listener(data);
  }

  async #write(change) {
    try {
      const transaction = this.#database.transaction(["heads", "bodies"], "readwrite");
      change(transaction.objectStore("heads"), transaction.objectStore("bodies"));
      await new Promise((resolve, reject) => {
        transaction.oncomplete = resolve;
        transaction.onabort = transaction.onerror = () => reject(transaction.error ?? new Error("aborted"));
      });
    } catch (error) {
      throw new StoreError(
        error.name === "QuotaExceededError"
          ? "The browser's storage is full: this conversation is not kept. Export it, or delete others."
          : `The browser could not keep this conversation: ${error.message}`,
      );
    }
  }
}

/** Store without a database: nothing outlives the tab. */
export class MemoryStore {
  #all = new Map();

  async heads() {
    return [...this.#all.values()].sort((a, b) => b.updated - a.updated);
  }

  async load(id) {
    return structuredClone(this.#all.get(id));
  }

  async save(conversation) {
    this.#all.set(conversation.id, structuredClone(conversation));
  }

  async remove(id) {
    this.#all.delete(id);
  }

  async search(text) {
    return new Set([...this.#all.values()].filter((one) => contains(one, text)).map(({ id }) => id));
  }

  onChange() {}
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("another tab has an older version of this page open"));
  });
}

/** Value in localStorage, or the default. */
export function recall(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(`llamacli-${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Keep a small value in localStorage; returns false if that is not possible. */
export function remember(name, value) {
  try {
    localStorage.setItem(`llamacli-${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** Texts of replies that are being written, kept when the page is left: the database is too slow for that. */
export const journal = {
  write(entries) {
    try {
      if (entries.length) localStorage.setItem(JOURNAL, JSON.stringify(entries));
    } catch {
      // The last save of the database, at most a second old, remains.
    }
  },
  take() {
    try {
      return JSON.parse(localStorage.getItem(JOURNAL)) ?? [];
    } catch {
      return [];
    } finally {
      localStorage.removeItem(JOURNAL);
    }
  },
};
