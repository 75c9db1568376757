// Formats numbers, times and names for people.

import { h, link, to } from "./dom.js";

const plain = new Intl.NumberFormat("en");

/** Formats a number of addresses. A number that is too large for JSON arrives as text. */
export function count(value) {
  const number = Number(value);
  if (number < 1e15) return plain.format(number);
  const power = Math.floor(Math.log10(number));
  const digits = [..."⁰¹²³⁴⁵⁶⁷⁸⁹"];
  return `${(number / 10 ** power).toFixed(1)} × 10${[...String(power)].map((digit) => digits[digit]).join("")}`;
}

/** Formats a number with its noun: `1 block`, `2 blocks`. */
export function many(value, one, more = `${one}s`) {
  return `${count(value)} ${Number(value) === 1 ? one : more}`;
}

/** Formats a part of a whole. */
export function share(part, whole) {
  const of = Number(whole);
  const percent = of > 0 ? (Number(part) / of) * 100 : 0;
  if (percent > 0 && percent < 0.1) return "< 0.1%";
  if (percent > 99.9 && percent < 100) return "> 99.9%";
  return `${percent < 10 && percent > 0 ? percent.toFixed(1) : Math.round(percent)}%`;
}

/** Formats a time span roughly. */
export function span(seconds) {
  const units = [[365.25 * 86400, "year"], [30.4 * 86400, "month"], [86400, "day"], [3600, "hour"], [60, "minute"]];
  for (const [size, name] of units) {
    const value = seconds / size;
    if (value >= (name === "month" || name === "year" ? 2 : 1.95)) return many(Math.round(value), name);
    if (name === "minute" && value >= 1) return "1 minute";
  }
  return many(Math.max(1, Math.round(seconds)), "second");
}

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const date = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

/** Formats a time: today as the time only, other days with the date. The title has both in full. */
export function moment(text) {
  if (!text) return h("span", { class: "muted" }, "time not known");
  const at = new Date(text);
  const today = at.toDateString() === new Date().toDateString();
  return h("time", { datetime: text, title: `${text} (UTC), ${at.toLocaleString()} here` },
    today ? clock.format(at) : `${date.format(at)}, ${clock.format(at)}`);
}

/** The states of an address and their names, in the order of the bars. */
export const USES = [
  ["used", "In use"],
  ["borrowed", "Borrowed"],
  ["resting", "Cooldown"],
  ["reserved", "Reserved"],
  ["free", "Free"],
];

/** Returns the name of a state. */
export function useName(use) {
  return USES.find(([name]) => name === use)?.[1] ?? use;
}

/** Creates a legend of the colours. */
export function legend(uses) {
  const names = USES.filter(([name]) => uses.includes(name));
  return h("ul", { class: "legend", "aria-label": "Colours" },
    names.map(([name, text]) => h("li", null, h("i", { class: `swatch ${name}` }), text)));
}

/** Returns the pod of a holder, or its container, or its handle, as text. */
export function holderText(holder) {
  if (!holder) return "";
  if (holder.pod) return holder.namespace ? `${holder.namespace}/${holder.pod}` : holder.pod;
  return holder.container ?? holder.handle ?? "no handle";
}

/** Returns the pod and the container or handle of a holder, with links to their histories. */
export function holderLinks(holder) {
  if (!holder) return "";
  const links = [];
  if (holder.pod) {
    const name = holder.namespace ? `${holder.namespace}/${holder.pod}` : holder.pod;
    links.push(link(to("pod", name), name, { class: "mono" }));
  }
  const id = holder.container ?? holder.handle;
  if (id) links.push(link(to("container", id), short(id), { class: holder.pod ? "mono faint" : "mono", title: id }));
  if (links.length === 0) return h("span", { class: "muted" }, "no handle");
  return links.flatMap((one, place) => (place ? [" ", one] : [one]));
}

/** Creates a link to a node. */
export function nodeLink(name) {
  return name ? link(to("node", name), name, { class: "mono" }) : "";
}

/** Creates a link to an address. */
export function addressLink(ip) {
  return link(to("address", ip), ip, { class: "mono" });
}

/** Creates a link to a block. */
export function blockLink(cidr) {
  return link(to("block", cidr), cidr, { class: "mono" });
}

/** Shortens a container id like runtimes do. */
export function short(id) {
  return /^[0-9a-f]{64}$/.test(id) ? id.slice(0, 12) : id;
}

/** Returns the owner of a block, with a link if it is a node. */
export function ownerLink(owner) {
  if (!owner) return h("span", { class: "muted" }, "nobody");
  return owner.startsWith("host:") ? nodeLink(owner.slice(5)) : h("span", { class: "mono" }, owner);
}
