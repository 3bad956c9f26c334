// The server's state, once per second while the page is visible.

import { ApiError, events, request } from "./api.js";
import { onKeys, statusHeaders } from "./keys.js";

const FIRST_WAIT_MS = 500;
const MAX_WAIT_MS = 10_000;
const HIDDEN_MS = 10_000;
const SILENT_MS = 5_000;

/** Calls `history(points)`, `status(status)` and, when the feed is lost, `lost(error)`. */
export class Feed {
  constructor(handlers) {
    this.handlers = handlers;
    this.abort = null;
    this.wake = () => {};
    onKeys(() => this.restart());
    document.addEventListener("visibilitychange", () => this.look());
  }

  async run() {
    let wait = FIRST_WAIT_MS;
    for (;;) {
      if (document.hidden) await this.sleep(Infinity);
      try {
        await this.read(() => { wait = FIRST_WAIT_MS; });
        this.handlers.lost(null);
      } catch (error) {
        this.handlers.lost(error);
        const needsKey = error instanceof ApiError && [401, 403].includes(error.status);
        if (needsKey) await this.sleep(Infinity);
      }
      await this.sleep(wait);
      wait = Math.min(2 * wait, MAX_WAIT_MS);
    }
  }

  async read(onEvent) {
    const abort = new AbortController();
    this.abort = abort;
    const silent = () => setTimeout(() => abort.abort(), SILENT_MS);
    let timer = silent();
    try {
      const response = await request("page/feed", { headers: statusHeaders(), signal: abort.signal });
      for await (const { name, data } of events(response)) {
        clearTimeout(timer);
        timer = silent();
        onEvent();
        this.handlers[name]?.(JSON.parse(data));
      }
    } finally {
      clearTimeout(timer);
    }
  }

  /** Reconnect immediately, for example with other keys. */
  restart() {
    this.abort?.abort();
    this.wake();
  }

  look() {
    clearTimeout(this.hidden);
    if (document.hidden) this.hidden = setTimeout(() => this.abort?.abort(), HIDDEN_MS);
    else this.wake();
  }

  sleep(ms) {
    return new Promise(resolve => {
      this.wake = resolve;
      if (ms !== Infinity) setTimeout(resolve, ms);
    });
  }
}
