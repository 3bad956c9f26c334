// Requests to the server, and reading of its event streams.

/** An error response in OpenAI's format. */
export class ApiError extends Error {
  constructor(status, info = {}) {
    super(info.message || `The server responded with status ${status}.`);
    this.status = status;
    this.code = info.code ?? null;
  }
}

/** Return the response to a request. Throws `ApiError`, and whatever `fetch` throws. */
export async function request(path, { headers = {}, body, signal } = {}) {
  const sent = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const type = body === undefined ? {} : { "content-type": "application/json" };
  const response = await fetch(path, { ...sent, headers: { ...type, ...headers }, signal });
  if (response.ok) return response;
  const text = await response.text();
  let info = {};
  try {
    info = JSON.parse(text).error ?? {};
  } catch {
    // An error page of a proxy, not a response of this server.
  }
  throw new ApiError(response.status, info);
}

/** Yield `{name, data}` for each server-sent event of `response`. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const event = parse(rest.slice(0, end));
        rest = rest.slice(end + 2);
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  const event = { name: "message", data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("data: ")) event.data += line.slice(6);
    else if (line.startsWith("event: ")) event.name = line.slice(7);
  }
  return event;
}
