// The view of a pool: its numbers, its forecast, and the map of its blocks.

import { ask } from "./api.js";
import { empty, h, link, table, to } from "./dom.js";
import { USES, blockLink, count, legend, many, ownerLink, share } from "./format.js";
import { BlockMap, blockWords } from "./map.js";
import { bar, forecastOf, taken } from "./overview.js";

/** Number of rows that the table of blocks shows at first, and adds at each step. */
const ROWS = 200;

/** A table of at most this many blocks is open at first. */
const FEW = 50;

/** Reads all blocks of a pool, or of no pool, in parts. */
async function blocksOf(pool, signal) {
  const blocks = [];
  for (;;) {
    const part = await ask("blocks", { ...(pool === null ? {} : { pool }), from: blocks.length }, signal);
    for (const [cidr, owner, used, borrowed, resting, reserved, free] of part.blocks) {
      blocks.push({ cidr, owner: part.owners[owner] ?? null, used, borrowed, resting, reserved, free });
    }
    if (part.blocks.length === 0 || blocks.length >= part.total) return blocks;
  }
}

function blockTable(blocks) {
  const body = h("div", null);
  let shown = ROWS;
  const show = () => {
    const rows = blocks().slice(0, shown).map((block) => [blockLink(block.cidr), ownerLink(block.owner), count(block.used),
      count(block.borrowed), count(block.resting), count(block.reserved), count(block.free)]);
    const rest = blocks().length - rows.length;
    const more = h("button", { type: "button" }, `Show ${count(Math.min(rest, ROWS))} more of ${count(rest)}`);
    more.addEventListener("click", () => {
      shown += ROWS;
      show();
    });
    body.replaceChildren(
      table("Blocks", ["Block", "Owner", ...USES.map(([, name]) => [name, "number"])], rows),
      ...(rest > 0 ? [h("p", { class: "more" }, more)] : []));
  };
  const details = h("details", { class: "panel" }, h("summary", null, "The blocks as a table"), body);
  details.addEventListener("toggle", () => (details.open ? show() : body.replaceChildren()));
  return { details, refresh: () => details.open && show() };
}

function blockSection(signal, title) {
  const chosen = h("p", { class: "chosen", "aria-live": "polite" });
  const number = h("span", null);
  const tell = (block) => chosen.replaceChildren(h("b", { class: "mono" }, block.cidr), ...blockWords(block).map((words) => h("span", null, words)));
  const map = new BlockMap({ signal, chosen: tell, open: (block) => (location.hash = to("block", block.cidr)) });
  const { details, refresh } = blockTable(() => map.blocks);
  const panel = h("section", { class: "panel" },
    h("div", { class: "title" }, h("h2", null, title), number),
    h("div", { class: "body" }, map.element), chosen);
  let isFirst = true;
  const set = (blocks) => {
    map.set(blocks);
    if (isFirst && blocks.length <= FEW) details.open = true;
    isFirst = false;
    number.textContent = many(blocks.length, "block");
    if (!chosen.hasChildNodes()) chosen.textContent = "Point at a block, or move with the arrow keys.";
    refresh();
  };
  return { nodes: [panel, details], set };
}

function numbers(pool) {
  const told = USES.filter(([use]) => use === "used" || use === "free" || Number(pool[use]) > 0);
  return h("dl", { class: "numbers" },
    told.map(([use, name]) => h("div", null, h("dt", null, h("i", { class: `swatch ${use}` }), name), h("dd", null, count(pool[use])))),
    h("div", null, h("dt", null, pool.prefix_length ? `Prefixes of /${pool.prefix_length}` : "Addresses"), h("dd", null, count(pool.capacity))),
    h("div", null, h("dt", null, "Blocks"), h("dd", null, count(pool.blocks), " ", h("small", null, `${count(pool.full)} full`))));
}

/** Builds the view of a pool. */
export async function pool({ rest: name, signal }) {
  const find = async () => {
    const overview = await ask("overview", null, signal);
    return overview.pools.find((one) => one.name === name);
  };
  const told = await find();
  const trail = h("p", { class: "trail" }, link("#/", "Pools"));
  if (!told) {
    return { title: name, nodes: [h("div", null, trail, h("h1", { tabindex: "-1" }, name)),
      empty("There is no pool of this name", "It may have been deleted. The pools that there are:", "margay pool list")] };
  }
  const top = h("div", { class: "stack" });
  const forecast = h("span", { class: "forecast" });
  const ahead = async () => {
    const { pools, history_seconds: seconds } = await ask("forecast", null, signal);
    const [text, urgency] = forecastOf(pools.find((one) => one.name === name), seconds);
    forecast.textContent = text;
    forecast.className = `forecast ${urgency}`;
  };
  const show = (pool) => top.replaceChildren(
    h("div", null, bar(pool, { class: "bar large" }),
      h("p", { class: "under" }, h("b", null, `${share(taken(pool), pool.capacity)} taken`), forecast)),
    numbers(pool));
  const section = blockSection(signal, "Block map");
  const fill = async (pool) => {
    show(pool);
    section.set(await blocksOf(name, signal));
    ahead().catch(() => {});
  };
  const possible = (pool) => {
    const bits = pool.block_size - Number(pool.cidr.split("/")[1]);
    return bits >= 0 ? 2 ** bits : 0;
  };
  show(told);
  const facts = h("p", null, h("span", { class: "mono" }, told.cidr), ` in blocks of /${told.block_size}; `,
    `${count(told.blocks)} of ${count(possible(told))} are there`);
  const head = h("div", null, trail, h("div", { class: "head" }, h("h1", { tabindex: "-1" }, name),
    told.enabled ? null : h("span", { class: "badge note" }, "not enabled"), facts));
  const blocks = told.blocks === 0 ? null : await blocksOf(name, signal);
  const nodes = [head, top];
  if (blocks) {
    nodes.push(legend(USES.map(([use]) => use)), ...section.nodes);
  } else {
    nodes.push(empty("No block yet", "A node claims a block of the pool when its first container asks for an address.",
      "margay ipam explain --node NODE"));
  }
  return { title: name, nodes,
    shown: () => {
      if (blocks) section.set(blocks);
      ahead().catch(() => {});
    },
    refresh: blocks ? async () => {
      const now = await find();
      if (now) await fill(now);
    } : undefined,
  };
}

/** Builds the view of the blocks outside of all pools. */
export async function orphaned({ signal }) {
  const blocks = await blocksOf(null, signal);
  const section = blockSection(signal, "Blocks");
  const head = h("div", null, h("p", { class: "trail" }, link("#/", "Pools")), h("h1", { tabindex: "-1" }, "Blocks that lie in no pool"));
  if (blocks.length === 0) return { title: "Blocks in no pool", nodes: [head, empty("There is none", "Every block lies in a pool.")] };
  return { title: "Blocks in no pool", nodes: [head, ...section.nodes], shown: () => section.set(blocks) };
}
