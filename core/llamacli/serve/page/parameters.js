// Parameters of requests under the server's names, with their meanings.
//
// `param` is the name in the server's defaults (/props), where there is one.

/** Groups of sampling parameters. */
export const GROUPS = [
  {
    title: "Randomness",
    parameters: [
      { name: "temperature", param: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05,
        meaning: "Higher is more varied, lower more predictable. 0 always takes the most probable token." },
      { name: "dynatemp_range", param: "dynatemp_range", label: "Dynamic temperature range", min: 0, max: 2, step: 0.05,
        meaning: "The temperature varies by up to this much: higher where the model is unsure. 0 is off." },
      { name: "dynatemp_exponent", param: "dynatemp_exponent", label: "Dynamic temperature exponent", min: 0, max: 5, step: 0.1,
        meaning: "How strongly the dynamic temperature follows the model's uncertainty." },
      { name: "seed", label: "Seed", min: -1, step: 1,
        meaning: "The same seed, settings and messages give the same reply. Empty: another one each time." },
    ],
  },
  {
    title: "Choice of tokens",
    parameters: [
      { name: "top_k", param: "top_k", label: "Top k", min: 0, step: 1,
        meaning: "Only the k most probable tokens can be drawn. 0 is off." },
      { name: "top_p", param: "top_p", label: "Top p", min: 0, max: 1, step: 0.01,
        meaning: "Only the most probable tokens that together reach this probability can be drawn. 1 is off." },
      { name: "min_p", param: "min_p", label: "Min p", min: 0, max: 1, step: 0.01,
        meaning: "Tokens less probable than this share of the most probable one are dropped. 0 is off." },
      { name: "typical_p", param: "typical_p", label: "Typical p", min: 0, max: 1, step: 0.01,
        meaning: "Keeps the tokens whose surprise is closest to what is expected. 1 is off." },
      { name: "top_n_sigma", param: "top_n_sigma", label: "Top n sigma", min: -1, max: 10, step: 0.1,
        meaning: "Drops logits more than n standard deviations below the largest. 0 or less is off." },
      { name: "xtc_probability", param: "xtc_probability", label: "XTC probability", min: 0, max: 1, step: 0.01,
        meaning: "How often the most probable tokens are dropped, for less expected texts. 0 is off." },
      { name: "xtc_threshold", param: "xtc_threshold", label: "XTC threshold", min: 0, max: 1, step: 0.01,
        meaning: "Probability above which XTC drops all tokens but the least probable one. Above 0.5 is off." },
      { name: "adaptive_target", param: "adaptive_target", label: "Adaptive target", min: -1, max: 1, step: 0.01,
        meaning: "Draws tokens near this probability. Below 0 is off." },
      { name: "adaptive_decay", param: "adaptive_decay", label: "Adaptive decay", min: 0, max: 0.99, step: 0.01,
        meaning: "How slowly the adaptive target follows what was drawn." },
    ],
  },
  {
    title: "Repetition",
    parameters: [
      { name: "repeat_penalty", param: "repeat_penalty", label: "Repeat penalty", min: 0, max: 2, step: 0.01,
        meaning: "Above 1, tokens that came recently become less probable. 1 is off." },
      { name: "frequency_penalty", param: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.05,
        meaning: "Lowers a token's logit by this much for each time that it came. 0 is off." },
      { name: "presence_penalty", param: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.05,
        meaning: "Lowers a token's logit by this much once it has come. 0 is off." },
      { name: "repeat_last_n", param: "repeat_last_n", label: "Penalty window", min: -1, step: 1,
        meaning: "Number of recent tokens that the penalties look at. 0 is off." },
      { name: "dry_multiplier", param: "dry_multiplier", label: "DRY multiplier", min: 0, max: 5, step: 0.05,
        meaning: "Strength of the penalty on tokens that would continue a repeated sequence. 0 is off." },
      { name: "dry_base", param: "dry_base", label: "DRY base", min: 1, max: 4, step: 0.05,
        meaning: "How fast the DRY penalty grows with the length of the repetition." },
      { name: "dry_allowed_length", param: "dry_allowed_length", label: "DRY allowed length", min: 0, step: 1,
        meaning: "Repeated sequences up to this many tokens are free." },
      { name: "dry_penalty_last_n", param: "dry_penalty_last_n", label: "DRY window", min: -1, step: 1,
        meaning: "Number of recent tokens that DRY looks at. -1 is the whole context." },
      { name: "dry_sequence_breakers", param: "dry_sequence_breakers", label: "DRY sequence breakers", kind: "json",
        meaning: "Texts at which a repetition ends, as a JSON list." },
    ],
  },
  {
    title: "Mirostat and order",
    parameters: [
      { name: "mirostat", param: "mirostat", label: "Mirostat", min: 0, max: 2, step: 1,
        meaning: "1 or 2 keeps the surprise of the text at a target, in place of the other choices. 0 is off." },
      { name: "mirostat_tau", param: "mirostat_tau", label: "Mirostat tau", min: 0, max: 10, step: 0.1,
        meaning: "Target surprise in bits: lower is more focused." },
      { name: "mirostat_eta", param: "mirostat_eta", label: "Mirostat eta", min: 0, max: 1, step: 0.01,
        meaning: "How fast Mirostat adapts." },
      { name: "samplers", param: "samplers", label: "Order of samplers", kind: "json",
        meaning: "Names in the order in which they apply, as a JSON list; those left out are off." },
      { name: "logit_bias", label: "Logit bias", kind: "json",
        meaning: "Numbers from -100 to 100 added to the logits of token ids, as JSON such as {\"42\": -100}." },
    ],
  },
];

/** Parameters of the reply's length and end. */
export const LIMITS = [
  { name: "max_tokens", label: "Longest reply, in tokens", min: 1, step: 1,
    meaning: "The reply ends after this many tokens. Empty: when the model ends it, or the context is full." },
  { name: "stop", label: "Stop texts", kind: "lines",
    meaning: "One a line: the reply ends before the first of them that comes." },
  { name: "ignore_eos", label: "Ignore the end", kind: "switch",
    meaning: "Go on after the model would have ended its reply." },
];

export const PARAMETERS = [...GROUPS.flatMap((group) => group.parameters), ...LIMITS];

/** Value of a parameter from the text of its field; undefined for an empty one. Throws an Error in words. */
export function parse(parameter, text) {
  const { kind, label, min, max, step } = parameter;
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
  const whole = Number.isInteger(step);
  if (!Number.isFinite(value) || (whole && !Number.isInteger(value))) {
    throw new Error(`${label} must be a ${whole ? "whole " : ""}number.`);
  }
  // The upper limits of sliders without a limit of their own on the server are only hints.
  if (value < min || (max !== undefined && max <= 1 && value > max)) {
    throw new Error(`${label} must be ${max !== undefined && max <= 1 ? `from ${min} to ${max}` : `at least ${min}`}.`);
  }
  return value;
}
