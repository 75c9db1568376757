// Events as rows.

import { live } from "./api.js";
import { empty, h, table } from "./dom.js";
import { addressLink, blockLink, count, holderLinks, holderText, moment, nodeLink, ownerLink } from "./format.js";

const WORDS = {
  assigned: "assigned", renewed: "asked again", moved: "moved", released: "released", resting: "in cooldown",
  rested: "free again", claimed: "claimed", given_up: "given up", affinity: "affinity", damaged: "damaged", held: "held",
  owned: "owned",
};

/** Returns the word for an event. */
function word(event) {
  return h("span", { class: `word ${event.event}` }, WORDS[event.event] ?? event.event);
}

/** Returns the holder of an event. Its fields are members of the event itself. */
function holderOf(event) {
  return "handle" in event ? event : null;
}

/** Returns the holder or the owner, with links. */
function who(event) {
  if (event.owner) {
    const before = event.former_owner ? [", before ", ownerLink(event.former_owner)] : [];
    return [ownerLink(event.owner), event.state ? ` ${event.state.replaceAll("_", " ")}` : "", ...before];
  }
  const from = event.from ? [", before ", ...[holderLinks(event.from)].flat()] : [];
  return [holderLinks(holderOf(event)), ...from].flat();
}

function place(event) {
  return event.address ? addressLink(event.address) : blockLink(event.block);
}

function item(event) {
  if (event.event === "gap") return h("li", null, h("span", { class: "gap" }, `Events are missing here: ${event.what}`));
  const node = event.node;
  return h("li", null,
    h("span", { class: "when" }, moment(event.time)), word(event), h("span", null, place(event)),
    h("span", { class: "about" }, who(event), node ? [" on ", nodeLink(node)] : null));
}

/** Creates a narrow list of events. */
export function eventList(events) {
  if (events.length === 0) return h("p", { class: "more" }, "Nothing has happened since this page was opened.");
  return h("ol", { class: "events" }, events.map(item));
}

/** Creates a table of events. */
export function eventTable(label, events) {
  return table(label, [["Time", "nowrap"], ["Event", "nowrap bare"], "Address or block", "Holder or owner", "Node", ["Revision", "number"]],
    events.map((event) => event.event === "gap"
      ? [h("span", { class: "muted" }, "gap"), "", "", event.what, "", count(event.revision)]
      : [moment(event.time), word(event), place(event), who(event), nodeLink(event.node), count(event.revision)]));
}

function matches(event, text) {
  const told = [event.address, event.block, event.owner, event.event, WORDS[event.event], holderText(holderOf(event)),
    event.handle, event.node, event.what];
  return told.some((one) => one?.toLowerCase().includes(text));
}

/** Builds the view of live events. */
export async function events({ signal }) {
  const list = h("div", { "aria-live": "off" });
  const number = h("span", null);
  const filter = h("input", { class: "filter", type: "search", "aria-label": "Show only events with this text", placeholder: "Only with this text" });
  const show = () => {
    const text = filter.value.trim().toLowerCase();
    const found = text ? live.events.filter((event) => matches(event, text)) : live.events;
    number.textContent = text ? `${count(found.length)} of ${count(live.events.length)}` : `${count(found.length)}, newest first`;
    const held = list.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    list.replaceChildren(found.length ? eventTable("Events", found) : empty(
      text ? "No event has this text" : "Nothing has happened yet",
      "Assignments and releases show here as they happen. The page keeps the newest 500 of them."));
    if (held) [...list.querySelectorAll("a")].find((one) => one.getAttribute("href") === held)?.focus();
  };
  filter.addEventListener("input", show);
  live.addEventListener("batch", show, { signal });
  show();
  return { title: "Events", still: true, nodes: [
    h("div", { class: "head" }, h("h1", { tabindex: "-1" }, "Events"), h("p", null, "as they happen")),
    h("section", { class: "panel" }, h("div", { class: "title" }, filter, number), list),
  ] };
}
