// Client of the server's API, and its errors in words.

import { chunksOf, events } from "./sse.js";

const KEY = "llamacli-key";

/** Error of the API: status (0 for none), code, seconds after which to retry (null for unknown). */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfter = null, requestId = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, retryAfter, requestId });
  }
}

/** API key of this browser tab; it is forgotten with the tab. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** JSON of a GET request. */
export async function get(path) {
  return (await send(path, {})).json();
}

/** JSON of a POST request. */
export async function post(path, body, signal) {
  return (await send(path, { method: "POST", body: JSON.stringify(body), signal })).json();
}

/** Objects of a streamed POST request. Throws ApiError, also for a stream that ends without its end marker. */
export async function* stream(path, body, signal) {
  const response = await send(path, { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal });
  const cut = (error) => {
    if (signal.aborted) throw error ?? new DOMException("aborted", "AbortError");
    throw new ApiError("The connection was lost before the reply was complete.", { code: "cut" });
  };
  try {
    for await (const data of events(chunksOf(response.body))) {
      if (data === "[DONE]") return;
      const value = JSON.parse(data);
      if (value.error) throw asError(value.error, response);
      yield value;
    }
  } catch (error) {
    if (error instanceof ApiError) throw error;
    cut(error);
  }
  cut();
}

async function send(path, options) {
  const headers = {};
  if (options.body) headers["content-type"] = "application/json";
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. It may have been stopped, or the network is down.", { code: "network" });
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw asError(body.error ?? {}, response);
}

function asError(error, response) {
  const after = Number(response.headers.get("retry-after"));
  return new ApiError(error.message ?? `The server answered with status ${response.status}.`, {
    status: response.status,
    code: error.code ?? null,
    param: error.param ?? null,
    retryAfter: after > 0 ? after : null,
    requestId: response.headers.get("x-request-id"),
  });
}

const TITLES = {
  400: "The server cannot do this",
  401: "An API key is needed",
  403: "The server does not accept this address",
  404: "Not found",
  408: "The request took too long",
  413: "The message is too large",
  429: "The server is busy",
  500: "The server failed",
  501: "The server does not support this",
  503: "The server is not ready",
};
const TITLES_OF_CODES = {
  context_length_exceeded: "The conversation is too long for this model",
  cut: "The connection was lost",
  network: "The server cannot be reached",
  invalid_schema: "The JSON schema is not valid",
  chat_template_error: "The model's chat template refuses this",
  model_not_found: "The server has no such model",
  loading: "The model is being loaded",
  shutting_down: "The server is shutting down",
};

/** Title of an error for people. */
export function titleOf(error) {
  return TITLES_OF_CODES[error.code] ?? TITLES[error.status] ?? "Something went wrong";
}

/** True where the same request may succeed later. */
export function isTemporary(error) {
  return [408, 429, 503].includes(error.status);
}
