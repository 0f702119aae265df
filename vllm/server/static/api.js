// The server's routes. Addresses are relative to this file's, so that a proxy may put the server under any path.

import { events } from "./sse.js";

export const BASE = new URL("../", import.meta.url).href;

const KEY = "vllm-api-key";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** What the server answered instead of a result. `param` is the field at fault, or null. */
export class ServerError extends Error {
  constructor(message, { status = 0, param = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, param, retryAfter });
  }
}

export const getJson = async (path) => (await call(path)).json();

export async function postJson(path, body, signal) {
  return (await call(path, { body, signal })).json();
}

/** The JSON chunks of a streamed answer. Throws ServerError for an error before, inside or instead of its end. */
export async function* postStream(path, body, signal) {
  const response = await call(path, { body, signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, chunk.error);
    yield chunk;
  }
  throw new ServerError("The connection ended before the answer was complete.");
}

async function call(path, { body, signal } = {}) {
  const headers = {};
  if (body) headers["Content-Type"] = "application/json";
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  let response;
  try {
    response = await fetch(BASE + path, {
      method: body ? "POST" : "GET",
      headers,
      signal,
      body: body && JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const { status } = response;
  const retryAfter = response.headers.get("Retry-After");
  try {
    const { error } = await response.json();
    return new ServerError(error.message, { status, param: error.param, retryAfter });
  } catch {
    return new ServerError(`The server answered ${status} ${response.statusText}`, { status, retryAfter });
  }
}
