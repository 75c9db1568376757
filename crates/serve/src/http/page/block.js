// The view of a block: a cell for each address, and the holders.

import { ask } from "./api.js";
import { empty, facts, h, link, table, to, withTip } from "./dom.js";
import { USES, addressLink, count, holderLinks, holderText, legend, moment, nodeLink, ownerLink, useName } from "./format.js";

/** Returns the text in the cell of an address: its last part. */
function tail(ip) {
  return ip.includes(":") ? `:${ip.slice(ip.lastIndexOf(":") + 1)}` : `.${ip.slice(ip.lastIndexOf(".") + 1)}`;
}

function cell(address) {
  const lines = () => [address.ip, useName(address.use), ...(address.holder
    ? [holderText(address.holder), address.holder.node ? `on ${address.holder.node}` : null].filter(Boolean) : [])];
  const label = `${address.ip}, ${useName(address.use).toLowerCase()}${address.holder ? `, ${holderText(address.holder)}` : ""}`;
  return withTip(link(to("address", address.ip), tail(address.ip), { class: `cell ${address.use}`, "aria-label": label }), lines);
}

/** Lets the arrow keys move in a grid of links. Tab moves to the next link as usual. */
function withArrows(grid) {
  grid.addEventListener("keydown", (event) => {
    const cells = [...grid.children];
    const at = cells.indexOf(document.activeElement);
    if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const wide = cells.filter((one) => one.offsetTop === cells[0].offsetTop).length;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - wide, ArrowDown: at + wide, Home: 0, End: cells.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    cells[to]?.focus();
  });
  return grid;
}

/** Builds the view. */
export async function block({ rest: cidr, signal }) {
  const told = await ask("block", { cidr }, signal);
  const trail = h("p", { class: "trail" }, link("#/", "Pools"), told.pool ? link(to("pool", told.pool), told.pool) : null);
  const head = h("div", null, trail, h("div", { class: "head" }, h("h1", { class: "mono", tabindex: "-1" }, told.cidr)));
  if (!told.exists) {
    return { title: told.cidr, nodes: [head, empty("Nobody has claimed this block",
      "All of its addresses are free. A node claims it when a container there needs an address and the node's own blocks are full.")] };
  }
  const numbers = Object.fromEntries(USES.map(([use]) => [use, told.addresses.filter((address) => address.use === use).length]));
  const held = told.addresses.filter((address) => address.holder || address.use === "resting");
  const rows = held.map((address) => [addressLink(address.ip), useName(address.use), holderLinks(address.holder),
    address.holder?.network ?? "", nodeLink(address.holder?.node), moment(address.since)]);
  return { title: told.cidr, nodes: [head,
    h("section", { class: "panel" }, h("div", { class: "body" }, facts([
      ["Owner", ownerLink(told.owner)], ["Pool", told.pool ? link(to("pool", told.pool), told.pool) : "none"],
      ...USES.filter(([use]) => use === "used" || numbers[use] > 0).map(([use, name]) => [name, count(numbers[use])]),
      ["Addresses", count(told.addresses.length)]]))),
    h("section", { class: "panel" },
      h("div", { class: "title" }, h("h2", null, "Addresses"), legend(USES.map(([use]) => use).filter((use) => numbers[use] > 0))),
      h("div", { class: "body" }, withArrows(h("div", { class: "cells of-16", id: "cells" }, told.addresses.map(cell))))),
    held.length ? h("section", { class: "panel" },
      h("div", { class: "title" }, h("h2", null, "Holders"), h("span", null, count(held.length))),
      table("Addresses that are not free", ["Address", "State", "Holder", "Network", "Node", ["Since", "nowrap"]], rows)) : null,
  ] };
}
