// Requests to the daemon, and its event stream.

/** The daemon refused a request (`status` is HTTP's), or does not answer (`status` is 0). */
export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Returns the answer to a request. `query` becomes the query string. */
export async function ask(path, query, signal) {
  const url = query ? `api/${path}?${new URLSearchParams(query)}` : `api/${path}`;
  let response;
  try {
    response = await fetch(url, { signal, headers: { accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The daemon does not answer.", 0);
  }
  let answer;
  try {
    answer = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(`The daemon answered ${response.status} and no JSON.`, response.status);
  }
  if (!response.ok) throw new Refused(answer.error ?? `The daemon answered ${response.status}.`, response.status);
  return answer;
}

/** Maximum number of stored events. */
const KEPT = 500;

/** The events since the page was opened, newest first, and the state of their stream. */
export class Live extends EventTarget {
  events = [];
  /** The newest known revision. */
  revision = 0;
  state = "wait";
  #seen = 0;
  #source = null;
  #retry = null;

  start() {
    this.stop();
    const query = this.#seen ? `after=${this.#seen}` : "recent=200";
    const source = (this.#source = new EventSource(`api/events?${query}`));
    const on = (name, act) => source.addEventListener(name, (message) => {
      const told = JSON.parse(message.data);
      this.revision = name === "batch" ? Math.max(this.revision, told.revision) : told.revision;
      act(told);
      this.#become("live");
    });
    on("ready", () => {});
    on("batch", (batch) => {
      // After a reconnect the store may repeat a batch.
      if (batch.revision <= this.#seen) return;
      this.#seen = batch.revision;
      this.#add(batch.events);
      this.dispatchEvent(new CustomEvent("batch", { detail: batch }));
    });
    on("reset", (told) => {
      this.#seen = told.revision;
      this.#add([{ event: "gap", what: told.reason, revision: told.revision }]);
      this.dispatchEvent(new CustomEvent("batch", { detail: { events: [] } }));
    });
    source.addEventListener("error", () => {
      this.#become("lost");
      // The browser reconnects automatically, unless the request was refused.
      if (source.readyState === EventSource.CLOSED) this.#retry = setTimeout(() => this.start(), 3000);
    });
  }

  /** Whether the event stream is open. */
  get isOpen() {
    return this.#source !== null;
  }

  /** Closes the event stream. */
  stop() {
    clearTimeout(this.#retry);
    this.#source?.close();
    this.#source = null;
  }

  #add(events) {
    this.events = [...events.toReversed(), ...this.events].slice(0, KEPT);
  }

  #become(state) {
    const changed = this.state !== state;
    this.state = state;
    this.dispatchEvent(new CustomEvent("state", { detail: { changed } }));
  }
}

/** The event stream of this page. */
export const live = new Live();
