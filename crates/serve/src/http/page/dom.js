// Creates elements. Texts from the store become text nodes, never HTML.

/** Creates an element. `props` are attributes; `on…` are listeners; `null` and `false` omit an attribute. */
export function h(name, props, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Creates a link to a view of this page. */
export function link(route, text, props) {
  return h("a", { href: route, ...props }, text);
}

/** Returns the URL hash of a view, such as `to("block", "10.0.0.0/26")`. Slashes are not escaped, for readable URLs. */
export function to(name, ...rest) {
  const part = (text) => encodeURIComponent(text).replaceAll("%2F", "/").replaceAll("%3A", ":");
  return `#/${[name, ...rest.map(part)].join("/")}`;
}

/**
 * Creates a table with a heading for each column. A column `[text, class]` sets the class of its cells. In a narrow
 * window the rows become blocks that repeat the headings. The roles keep it a table for screen readers.
 */
export function table(label, columns, rows) {
  const heads = columns.map((column) => (Array.isArray(column) ? column : [column, null]));
  const cell = (content, place) =>
    h("td", { role: "cell", class: heads[place][1], "data-head": heads[place][0] }, content ?? "");
  return h("div", { class: "table" },
    h("table", { role: "table", "aria-label": label },
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" },
        heads.map(([text, cls]) => h("th", { scope: "col", role: "columnheader", class: cls }, text)))),
      h("tbody", { role: "rowgroup" }, rows.map((cells) => h("tr", { role: "row" }, cells.map(cell))))));
}

/** Creates a list of facts. Facts without a value are omitted. */
export function facts(pairs) {
  const told = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, told.map(([name, value]) => {
    const dd = h("dd", null, value);
    return h("div", { class: dd.textContent.length > 30 ? "long" : null }, h("dt", null, name), dd);
  }));
}

/** Creates a panel for an empty view, which names the next step. */
export function empty(title, text, command) {
  return h("section", { class: "empty" }, h("h2", null, title), h("p", null, text), command ? codeLine(command) : null);
}

/** Creates a command with a button that copies it. */
export function codeLine(command) {
  const button = h("button", { type: "button", class: "copy", "aria-label": `Copy: ${command}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      button.textContent = "Copied";
    } catch {
      // Some browsers deny the clipboard. Select the text instead.
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  const code = h("code", null, command);
  return h("div", { class: "command" }, code, button);
}

const tip = document.getElementById("tip");
let tipOwner = null;

/** Shows lines of text beside a box in the window (`box` as from `getBoundingClientRect`). */
export function showTip(owner, box, lines) {
  tip.replaceChildren(...lines.map((line, place) => h(place ? "span" : "b", null, line)));
  tip.hidden = false;
  tipOwner = owner;
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.min(Math.max(8, box.left + box.width / 2 - width / 2), innerWidth - width - 8);
  const above = box.top - height - 8;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above >= 4 ? above : box.bottom + 8}px`;
}

/** Hides the tooltip, unless it belongs to another owner. */
export function hideTip(owner) {
  if (owner && owner !== tipOwner) return;
  tip.hidden = true;
  tipOwner = null;
}

/** Gives an element a tooltip on hover and on focus. */
export function withTip(element, lines) {
  const show = () => showTip(element, element.getBoundingClientRect(), lines());
  element.addEventListener("mouseenter", show);
  element.addEventListener("focus", show);
  element.addEventListener("mouseleave", () => hideTip(element));
  element.addEventListener("blur", () => hideTip(element));
  element.setAttribute("aria-describedby", "tip");
  return element;
}
