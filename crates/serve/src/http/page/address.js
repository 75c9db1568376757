// One address with its history, and the histories of containers, pods and nodes.

import { ask } from "./api.js";
import { empty, facts, h, link, table, to } from "./dom.js";
import { eventTable } from "./events.js";
import { addressLink, blockLink, count, holderLinks, moment, nodeLink, ownerLink, share, useName } from "./format.js";

async function history(of, kind, signal) {
  const told = await ask("history", { of, kind }, signal);
  const since = told.oldest_time ? [" (", moment(told.oldest_time), ")"] : [];
  const back = h("span", null, `the store can be read back to revision ${count(told.oldest_revision)}`, ...since);
  const body = told.events.length
    ? eventTable("History", told.events)
    : h("p", { class: "more" }, "Nothing has happened since then.");
  return h("section", { class: "panel" }, h("div", { class: "title" }, h("h2", null, "History"), back), body,
    told.more ? h("p", { class: "more" }, `Only the newest ${count(told.events.length)} events are shown; all of them: margay ipam history ${of}`) : null);
}

function attributes(name, held) {
  const rows = Object.entries(held ?? {}).map(([key, value]) => [h("span", { class: "mono" }, key), h("span", { class: "mono" }, value)]);
  return rows.length ? h("details", { class: "panel" }, h("summary", null, name), table(name, ["Attribute", "Value"], rows)) : null;
}

/** Builds the view of an address. */
export async function address({ rest: ip, signal }) {
  const told = await ask("address", { ip }, signal);
  const { holder } = told;
  const pod = holder?.pod ? (holder.namespace ? `${holder.namespace}/${holder.pod}` : holder.pod) : null;
  const container = holder?.container;
  const trail = h("p", { class: "trail" }, link("#/", "Pools"), told.pool ? link(to("pool", told.pool), told.pool) : null,
    told.block ? link(to("block", told.block), told.block) : null);
  return { title: told.ip, nodes: [
    h("div", null, trail, h("div", { class: "head" }, h("h1", { class: "mono", tabindex: "-1" }, told.ip),
      h("span", { class: "badge" }, h("i", { class: `swatch ${told.use}` }), ` ${useName(told.use)}`),
      told.reserved && told.use !== "reserved" ? h("span", { class: "badge" }, "reserved") : null)),
    h("section", { class: "panel" }, h("div", { class: "body" }, facts([
      ["Pod", pod ? link(to("pod", pod), pod, { class: "mono" }) : null],
      ["Container", container ? link(to("container", container), container, { class: "mono" }) : null],
      ["Handle", holder?.handle ? h("span", { class: "mono" }, holder.handle) : null],
      ["Network", holder?.network], ["Interface", holder?.interface], ["Node", holder?.node ? nodeLink(holder.node) : null],
      [told.use === "resting" ? "Released" : "Given", told.since ? moment(told.since) : null],
      ["In quarantine since", told.quarantined ? moment(told.quarantined.since) : null],
      ["Reason", told.quarantined ? `${told.quarantined.reason} (node ${told.quarantined.node})` : null],
      ["Block", told.block ? blockLink(told.block) : "not claimed by anybody"],
      ["Owner of the block", told.block ? ownerLink(told.owner) : null],
      ["Pool", told.pool ? link(to("pool", told.pool), told.pool) : "none: no pool has this address"]]))),
    await history(ip, "address", signal),
    attributes("Attributes of the holder", told.attributes),
    attributes("Attributes of the other holder", told.alternate),
  ] };
}

const KINDS = {
  container: ["Container", "It has no address now."],
  pod: ["Pod", "It has no address now."],
  node: ["Node", "It has no address now."],
};

/** Builds the view of a container, a pod or a node: its current addresses and its history. */
export async function subject({ route, rest: name, signal }) {
  const [kind, none] = KINDS[route];
  const [found, past] = await Promise.all([ask("held", { of: name, kind: route }, signal), history(name, route, signal)]);
  // In the view of a node, a column with its own name would be redundant.
  const isNode = route === "node";
  const columns = ["Address", "State", "Block", ...(isNode ? ["Holder"] : ["Network", "Node"]), ["Since", "nowrap"]];
  const rows = found.addresses.map((one) => [addressLink(one.ip), useName(one.use), blockLink(one.block),
    ...(isNode ? [holderLinks(one.holder)] : [one.holder?.network ?? "", nodeLink(one.holder?.node)]), moment(one.since)]);
  const blocks = (found.blocks ?? []).map((one) => [blockLink(one.cidr), count(one.used), count(one.free), share(one.used, one.used + one.free)]);
  return { title: name, nodes: [
    h("div", null, h("p", { class: "trail" }, kind), h("h1", { class: "mono", tabindex: "-1" }, name)),
    blocks.length ? h("section", { class: "panel" },
      h("div", { class: "title" }, h("h2", null, "Blocks"), h("span", null, count(blocks.length))),
      table("Blocks", ["Block", ["In use", "number"], ["Free", "number"], ["Share", "number"]], blocks)) : null,
    rows.length ? h("section", { class: "panel" },
      h("div", { class: "title" }, h("h2", null, "Addresses"), h("span", null, found.more ? `the first ${count(rows.length)}` : count(rows.length))),
      table("Addresses", columns, rows)) : h("p", { class: "muted" }, none),
    past,
  ] };
}

/** Builds the view of a search. */
export async function search({ rest: text, signal }) {
  const head = h("div", { class: "head" }, h("h1", { tabindex: "-1" }, "Search"), h("p", { class: "mono" }, text));
  if (!text.trim()) {
    return { title: "Search", nodes: [head, empty("What are you looking for?",
      "An address, a block, or a part of the name of a container, a pod, a namespace, a node, a network or a pool.")] };
  }
  const told = await ask("search", { q: text }, signal);
  const rows = told.addresses.map((one) => [addressLink(one.ip), useName(one.use), holderLinks(one.holder), one.holder?.network ?? "",
    nodeLink(one.holder?.node), blockLink(one.block)]);
  const part = (title, items) => items.length ? h("section", { class: "panel" },
    h("div", { class: "title" }, h("h2", null, title), h("span", null, count(items.length))),
    h("div", { class: "body" }, h("ul", null, items.map((item) => h("li", null, item))))) : null;
  const nodes = [head,
    part("Pools", told.pools.map((one) => [link(to("pool", one.name), one.name), " ", h("span", { class: "mono muted" }, one.cidr)])),
    part("Blocks", told.blocks.map(blockLink)),
    part("Nodes", told.nodes.map(nodeLink)),
    rows.length ? h("section", { class: "panel" },
      h("div", { class: "title" }, h("h2", null, "Addresses"), h("span", null, told.more ? `the first ${count(rows.length)}` : count(rows.length))),
      table("Addresses", ["Address", "State", "Holder", "Network", "Node", "Block"], rows)) : null];
  const none = nodes.slice(1).every((node) => node === null);
  return { title: `Search: ${text}`, nodes: none ? [head, empty("Nothing has this name or address",
    "A search finds the present holders of addresses. The history tells of earlier ones, if the store still has it:",
    "margay ipam history CONTAINER")] : nodes };
}
