// Parameters of requests under the server's names, with their meanings.

/** Parameters that are no numbers of the server's table, and the reply's length and end. */
export const LIMITS = [
  { name: "max_tokens", label: "Longest reply, in tokens", min: 1, whole: true,
    meaning: "The reply ends after this many tokens. Empty: when the model ends it, or the context is full." },
  { name: "seed", label: "Seed", min: -1, whole: true,
    meaning: "The same seed, settings and messages give the same reply. Empty: another one each time." },
  { name: "stop", label: "Stop texts", kind: "lines",
    meaning: "One a line: the reply ends before the first of them that comes." },
  { name: "ignore_eos", label: "Ignore the end", kind: "switch",
    meaning: "Go on after the model would have ended its reply." },
];
export const LISTS = [
  { name: "samplers", label: "Order of samplers", kind: "json",
    meaning: "Names in the order in which they apply, as a JSON list; those left out are off." },
  { name: "dry_sequence_breakers", label: "DRY sequence breakers", kind: "json",
    meaning: "Texts at which a repetition ends, as a JSON list." },
  { name: "logit_bias", label: "Logit bias", kind: "json",
    meaning: "Numbers from -100 to 100 added to the logits of token ids, as JSON such as {\"42\": -100}." },
];

/** Groups of parameters from the server's table, `sampling_parameters` of /props; fields are named as in JSON Schema. */
export function groupsOf(table = []) {
  const groups = new Map();
  for (const { name, group, type, minimum, maximum, description } of table) {
    const label = name.replaceAll("_", " ").replace(/^(dry|xtc)\b|^./, (start) => start.toUpperCase());
    const max = maximum === null || maximum >= 1e6 ? undefined : maximum;
    const one = { name, label, min: minimum, max, whole: type === "integer", meaning: description };
    groups.set(group, [...(groups.get(group) ?? []), one]);
  }
  return [...groups].map(([title, parameters]) => ({ title, parameters }));
}

/** Value of a parameter from the text of its field; undefined for an empty one. Throws an Error in words. */
export function parse(parameter, text) {
  const { kind, label, min, max, whole } = parameter;
  if (kind === "switch") return text || undefined;
  if (!text.trim()) return undefined;
  if (kind === "lines") return text.split("\n").filter((line) => line !== "");
  if (kind === "json") {
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new Error(`${label} is not JSON: ${error.message}`);
    }
  }
  const value = Number(text);
  if (!Number.isFinite(value) || (whole && !Number.isInteger(value))) {
    throw new Error(`${label} must be a ${whole ? "whole " : ""}number.`);
  }
  if (value < min || value > max) {
    throw new Error(`${label} must be ${max === undefined ? `at least ${min}` : `from ${min} to ${max}`}.`);
  }
  return value;
}
