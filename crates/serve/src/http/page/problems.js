// The findings of a check, and the commands that mend them.

import { ask } from "./api.js";
import { codeLine, empty, h, link, to } from "./dom.js";
import { count, many } from "./format.js";

/** Returns the subject of a finding, with a link if this page has a view of it. */
function subject({ subject: text, link: at }) {
  return at ? link(to(at.kind, at.name), text) : h("span", null, text);
}

function finding(one) {
  return h("li", { class: "finding" },
    h("div", { class: "line" },
      h("span", { class: `badge ${one.severity === "problem" ? "bad" : "note"}` }, one.code), h("b", null, subject(one))),
    h("p", null, one.what ? `${one.meaning.replace(/\.$/, ":")} ` : one.meaning, h("span", { class: "muted" }, one.what)),
    h("p", { class: "muted" }, one.repairable ? `A repair ${one.mend}:` : `To mend it: ${one.mend}`),
    one.command ? codeLine(one.command) : null);
}

/** Builds the view. */
export async function problems({ signal }) {
  const told = await ask("problems", null, signal);
  const head = h("div", { class: "head" }, h("h1", { tabindex: "-1" }, "Problems"),
    h("p", null, `found by a check, as of revision ${count(told.revision)}`));
  const looked = told.counts;
  const all = `${many(looked.blocks, "block")}, ${many(looked.handles, "handle")}, ${many(looked.affinities, "affinity", "affinities")} `
    + `and ${many(looked.held, "held address", "held addresses")}`;
  if (told.findings.length === 0) {
    return { title: "Problems", found: 0, slow: true, nodes: [head, empty("Everything is in order", `Looked at ${all}. A check in a terminal also looks for networks of this machine that overlap:`, "margay ipam check")] };
  }
  const left = told.total - told.findings.length;
  return { title: "Problems", found: told.problems, slow: true, nodes: [head,
    h("p", { class: "muted" }, `${many(told.problems, "problem")} in ${all}.`),
    h("section", { class: "panel" }, h("ol", null, told.findings.map(finding)),
      left > 0 ? h("p", { class: "more" }, `and ${count(left)} more; margay ipam check tells all of them`) : null)] };
}
