// The view of all pools, the nodes, and the latest events.

import { ask, live } from "./api.js";
import { empty, h, link, table, to } from "./dom.js";
import { eventList } from "./events.js";
import { USES, addressLink, count, legend, many, moment, nodeLink, share, span } from "./format.js";

/** Maximum number of events beside the pools. */
const LATEST = 10;

/** Returns the number of addresses of a pool that cannot be assigned. */
export function taken(pool) {
  return pool.used + pool.borrowed + pool.resting + Number(pool.reserved);
}

/** Creates a pool's bar. A state with any address is at least two pixels wide. */
export function bar(pool, props) {
  const whole = Number(pool.capacity);
  const words = USES.map(([use, name]) => `${name.toLowerCase()} ${count(pool[use])}`).join(", ");
  const parts = USES.filter(([use]) => use !== "free" && Number(pool[use]) > 0).map(([use]) => {
    const part = h("i", { class: use });
    part.style.width = `max(2px, ${(Number(pool[use]) / whole) * 100}%)`;
    return part;
  });
  return h("div", { class: "bar", role: "img", "aria-label": `Addresses: ${words}`, ...props }, parts);
}

/** Describes the forecast of a pool in words, and returns its urgency. */
export function forecastOf(forecast, seconds) {
  if (!forecast) return ["", ""];
  const of = `from ${span(seconds)} of history`;
  switch (forecast.kind) {
    case "full": return ["full", "soon"];
    case "short": return [`no forecast yet: ${span(seconds)} of history`, ""];
    case "steady": return [`not filling, ${of}`, ""];
    case "filling": break;
    default: return ["no forecast: the store keeps no times", ""];
  }
  const { days } = forecast;
  const when = days > 3650 ? "full in more than 10 years" : `full in about ${span(days * 86400)}`;
  return [`${when}, ${of}`, days < 7 ? "soon" : days < 60 ? "later" : ""];
}

function poolRow(pool) {
  const numbers = USES.filter(([use]) => use === "used" || Number(pool[use]) > 0)
    .map(([use, name]) => h("span", null, h("b", null, count(pool[use])), ` ${name.toLowerCase()}`));
  const forecast = h("span", { class: "forecast" });
  const row = link(to("pool", pool.name), [
    h("div", { class: "line" },
      h("span", { class: "name" }, pool.name),
      h("span", { class: "mono muted" }, pool.cidr),
      pool.enabled ? null : h("span", { class: "badge note" }, "not enabled"),
      h("span", { class: "percent" }, share(taken(pool), pool.capacity), h("small", null, " taken"))),
    bar(pool),
    h("div", { class: "line small" }, numbers, h("span", null, `of ${count(pool.capacity)}`),
      h("span", null, many(pool.blocks, "block")), forecast),
  ], { class: "pool" });
  return { row, tell: (told, seconds) => {
    const [text, urgency] = forecastOf(told, seconds);
    forecast.textContent = text;
    forecast.className = `forecast ${urgency}`;
  } };
}

function nodesPanel(answer) {
  const rows = answer.nodes.map((node) => [
    [nodeLink(node.name), node.registered ? null : h("span", { class: "badge note" }, "not registered")],
    count(node.blocks), count(node.used)]);
  const rest = answer.nodes_total - answer.nodes.length;
  return h("section", { class: "panel" },
    h("div", { class: "title" }, h("h2", null, "Nodes"), h("span", null, count(answer.nodes_total))),
    table("Nodes", ["Node", ["Blocks", "number"], ["Addresses", "number"]], rows),
    rest > 0 ? h("p", { class: "more" }, `and ${count(rest)} more; search for a node by its name`) : null);
}

function quotasPanel(answer) {
  const rows = answer.quotas.map((quota) => [
    `${quota.kind} ${quota.name}`, count(quota.used), count(quota.limit),
    quota.percent < 80 ? `${quota.percent}%` : h("span", { class: "badge note" }, `${quota.percent}%`)]);
  const rest = answer.quotas_total - answer.quotas.length;
  return h("section", { class: "panel" },
    h("div", { class: "title" }, h("h2", null, "Quotas"), h("span", null, count(answer.quotas_total))),
    table("Quotas", ["Of", ["In use", "number"], ["Limit", "number"], ["Part", "number"]], rows),
    rest > 0 ? h("p", { class: "more" }, `and ${count(rest)} that are used less: margay quota list`) : null);
}

/** Creates the list of quarantined addresses, which devices use without the store's knowledge. */
function quarantinePanel(quarantined) {
  const rows = quarantined.map((one) => [addressLink(one.address), one.reason, nodeLink(one.node), moment(one.since)]);
  return h("section", { class: "panel" },
    h("div", { class: "title" }, h("h2", null, "In quarantine"), h("span", null, count(rows.length))),
    table("In quarantine", ["Address", "Reason", "Found by", ["Since", "nowrap"]], rows));
}

/** Builds the view. */
export async function overview({ signal }) {
  const answer = await ask("overview", null, signal);
  if (answer.pools.length === 0) {
    return { title: "Pools", nodes: [h("h1", { tabindex: "-1" }, "Pools"), empty("There is no pool yet",
      "A pool is the network that containers get their addresses from. Create one, and this page shows how it fills. "
      + "A network whose configuration names a subnet creates its pool with its first container.",
      "margay pool create NAME CIDR")] };
  }
  const rows = answer.pools.map(poolRow);
  const latest = h("div", null, eventList(live.events.slice(0, LATEST)));
  const follow = () => latest.replaceChildren(eventList(live.events.slice(0, LATEST)));
  live.addEventListener("batch", follow, { signal });
  ask("forecast", null, signal).then((forecast) => {
    const of = new Map(forecast.pools.map((pool) => [pool.name, pool]));
    answer.pools.forEach((pool, place) => rows[place].tell(of.get(pool.name), forecast.history_seconds));
  }).catch(() => {});
  const hints = [];
  if (answer.gone > 0) hints.push(["Addresses of nodes that are not registered any more", answer.gone, "#/problems"]);
  if (answer.orphaned > 0) hints.push(["Blocks that lie in no pool", answer.orphaned, "#/orphaned"]);
  return { title: "Pools", nodes: [
    h("div", { class: "head" }, h("h1", { tabindex: "-1" }, "Pools"),
      h("p", null, `${many(answer.pools.length, "pool")}, ${many(answer.nodes_total, "node")}`)),
    h("div", { class: "columns" },
      h("div", { class: "stack" },
        h("section", { class: "panel", "aria-label": "Pools" }, rows.map(({ row }) => row)),
        legend(USES.map(([use]) => use)),
        hints.length ? h("section", { class: "panel" }, h("div", { class: "body" },
          hints.map(([text, number, route]) => h("p", null, link(route, `${text}: ${count(number)}`))))) : null,
        answer.quotas.length ? quotasPanel(answer) : null,
        answer.quarantined.length ? quarantinePanel(answer.quarantined) : null,
        answer.nodes.length ? nodesPanel(answer) : null),
      h("section", { class: "panel" },
        h("div", { class: "title" }, h("h2", null, "Latest events"), link("#/events", "All events")), latest)),
  ] };
}
