// Tokens with their probabilities, from both shapes of OpenAI's API.
//
// A token is {text, bytes, logprob, top}; `bytes` is there only where it is a part of a character. `top` has such
// tokens too, without a `top` of their own.

const decoder = () => new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** Tokens of a chat's `logprobs`. */
export function fromChat(logprobs) {
  return (logprobs?.content ?? []).map((entry) => ({ ...plain(entry), top: entry.top_logprobs.map(plain) }));
}

function plain({ token, bytes, logprob }) {
  return make(bytes ? Uint8Array.from(bytes) : new TextEncoder().encode(token), logprob);
}

/** Tokens of a completion's `logprobs`; parts of characters are named as bytes:\xe2. */
export function fromCompletion(logprobs) {
  return (logprobs?.tokens ?? []).map((name, i) => ({
    ...named(name, logprobs.token_logprobs[i] ?? 0),
    top: Object.entries(logprobs.top_logprobs[i] ?? {}).map(([other, value]) => named(other, value)),
  }));
}

function named(name, logprob) {
  const bytes = /^bytes:(?:\\x[\da-f]{2})+$/.test(name)
    ? Uint8Array.from(name.slice(6).match(/[\da-f]{2}/g), (hex) => parseInt(hex, 16))
    : new TextEncoder().encode(name);
  return make(bytes, logprob);
}

function make(bytes, logprob) {
  try {
    return { text: decoder().decode(bytes), logprob };
  } catch {
    return { text: Array.from(bytes, (byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join(""), bytes: [...bytes], logprob };
  }
}

/** Text of tokens joined, or null if it ends within a character. */
export function join(tokens) {
  const encoder = new TextEncoder();
  const parts = tokens.map((token) => (token.bytes ? Uint8Array.from(token.bytes) : encoder.encode(token.text)));
  const all = new Uint8Array(parts.reduce((n, part) => n + part.length, 0));
  let n = 0;
  for (const part of parts) {
    all.set(part, n);
    n += part.length;
  }
  try {
    return decoder().decode(all);
  } catch {
    return null;
  }
}

/** Alternatives of a token in descending order, the token itself among them. */
export function alternatives(token) {
  const same = (other) => other.text === token.text;
  const all = token.top.some(same) ? [...token.top] : [...token.top, token];
  return all.sort((a, b) => b.logprob - a.logprob).map((other) => ({ ...other, chosen: same(other) }));
}

/** Probability as text, in percent. */
export function percent(logprob) {
  const p = Math.exp(logprob) * 100;
  return `${p >= 10 ? p.toFixed(0) : p >= 0.1 ? p.toFixed(1) : p >= 0.01 ? p.toFixed(2) : "<0.01"} %`;
}

/** Level of a probability for colours: 0 (certain) to 4 (very improbable). */
export function level(logprob) {
  const p = Math.exp(logprob);
  return [0.8, 0.4, 0.15, 0.03].findIndex((limit) => p >= limit) + 1 || 5;
}

/** Text with white space made visible. */
export function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +| +$/g, (run) => "␣".repeat(run.length)) || "∅";
}
