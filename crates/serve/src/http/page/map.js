// The map of a pool's blocks: a cell for each block on a canvas. Only the visible rows are drawn, so that the work does
// not grow with the pool.

import { h, hideTip, showTip } from "./dom.js";
import { count, share } from "./format.js";

/** The padding around the cells, for the frame of the cursor. */
const PAD = 2;
const LAYERS = ["used", "borrowed", "resting", "reserved"];

/** Returns the size of a cell and the gap between cells, by the number of blocks. */
function sizes(number) {
  if (number <= 64) return [30, 4];
  if (number <= 400) return [20, 3];
  if (number <= 2000) return [14, 2];
  return [10, 2];
}

/** Describes a block in words. */
export function blockWords(block) {
  const capacity = block.used + block.borrowed + block.resting + block.reserved + block.free;
  const words = [`${count(block.used + block.borrowed)} of ${count(capacity)} in use (${share(block.used + block.borrowed, capacity)})`];
  if (block.borrowed) words.push(`${count(block.borrowed)} borrowed by other nodes`);
  if (block.resting) words.push(`${count(block.resting)} in cooldown`);
  if (block.reserved) words.push(`${count(block.reserved)} reserved`);
  words.push(block.owner?.startsWith("host:") ? `node ${block.owner.slice(5)}` : `owner: ${block.owner ?? "nobody"}`);
  return words;
}

/** A map of blocks. `open` is called with an activated block, `chosen` with the block under the cursor. */
export class BlockMap {
  blocks = [];
  #at = 0;
  #hovered = -1;
  #asked = 0;

  constructor({ open, chosen, signal }) {
    this.open = open;
    this.chosen = chosen;
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.room = h("div", { class: "room" });
    this.element = h("div", { class: "map", tabindex: "0", role: "group", id: "map" }, this.room, this.canvas);
    const on = (name, act) => this.element.addEventListener(name, act);
    on("scroll", () => this.#draw());
    on("keydown", (event) => this.#key(event));
    on("focus", () => this.#point(this.#at));
    on("blur", () => { hideTip(this); this.#draw(); });
    on("mousemove", (event) => this.#hover(this.#under(event)));
    on("mouseleave", () => this.#hover(-1));
    on("click", (event) => {
      const place = this.#under(event);
      if (place >= 0) this.open(this.blocks[place]);
    });
    const observer = new ResizeObserver(() => this.#lay());
    observer.observe(this.element);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => this.#lay(), { signal });
    document.addEventListener("themechange", () => this.#lay(), { signal });
    signal.addEventListener("abort", () => observer.disconnect());
  }

  /** Shows these blocks. The cursor stays on the same block. */
  set(blocks) {
    const cidr = this.blocks[this.#at]?.cidr;
    this.blocks = blocks;
    const place = blocks.findIndex((block) => block.cidr === cidr);
    this.#at = Math.max(0, place);
    this.element.setAttribute("aria-label",
      `Map of ${count(blocks.length)} blocks. Arrow keys move, Enter opens a block; the table below says the same in words.`);
    this.#lay();
  }

  #lay() {
    const width = this.element.clientWidth;
    if (width === 0) return;
    [this.cell, this.gap] = sizes(this.blocks.length);
    this.step = this.cell + this.gap;
    this.columns = Math.max(1, Math.floor((width - 2 * PAD + this.gap) / this.step));
    this.rows = Math.ceil(this.blocks.length / this.columns);
    const height = Math.max(this.cell, this.rows * this.step - this.gap) + 2 * PAD;
    this.room.style.height = `${height}px`;
    const seen = Math.min(height, parseFloat(getComputedStyle(this.element).maxHeight) || height);
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(seen * scale);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${seen}px`;
    this.seen = seen;
    const style = getComputedStyle(document.documentElement);
    this.colours = Object.fromEntries([...LAYERS, "free", "edge", "text", "focus"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
    this.#draw();
  }

  #draw() {
    if (this.#asked) return;
    this.#asked = requestAnimationFrame(() => {
      this.#asked = 0;
      this.#paint();
    });
  }

  #paint() {
    if (!this.step) return;
    const pen = this.canvas.getContext("2d");
    const scale = devicePixelRatio || 1;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    const top = this.element.scrollTop;
    const first = Math.floor(top / this.step) * this.columns;
    const last = Math.min(this.blocks.length, (Math.ceil((top + this.seen) / this.step) + 1) * this.columns);
    for (let place = first; place < last; place += 1) this.#cell(pen, place, top);
    this.element.dataset.drawn = last - first;
    const hasFocus = document.activeElement === this.element;
    if (this.#hovered >= 0) this.#frame(pen, this.#hovered, top, this.colours.text);
    if (hasFocus && this.blocks.length) this.#frame(pen, this.#at, top, this.colours.focus);
  }

  #corner(place, top) {
    return [PAD + (place % this.columns) * this.step, PAD + Math.floor(place / this.columns) * this.step - top];
  }

  #cell(pen, place, top) {
    const block = this.blocks[place];
    const [x, y] = this.#corner(place, top);
    const size = this.cell;
    pen.fillStyle = this.colours.free;
    pen.fillRect(x, y, size, size);
    const capacity = block.used + block.borrowed + block.resting + block.reserved + block.free;
    let below = 0;
    for (const layer of LAYERS) {
      if (!block[layer]) continue;
      const from = Math.round((below / capacity) * size);
      below += block[layer];
      const until = Math.max(from + 1, Math.round((below / capacity) * size));
      pen.fillStyle = this.colours[layer];
      pen.fillRect(x, y + size - until, size, until - from);
    }
    if (size >= 14) {
      pen.strokeStyle = this.colours.edge;
      pen.lineWidth = 1;
      pen.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    }
  }

  #frame(pen, place, top, colour) {
    const [x, y] = this.#corner(place, top);
    pen.strokeStyle = colour;
    pen.lineWidth = 2;
    pen.strokeRect(x - 0.5, y - 0.5, this.cell + 1, this.cell + 1);
  }

  /** Returns the index of the block under the mouse, or -1. */
  #under(event) {
    const box = this.element.getBoundingClientRect();
    const x = event.clientX - box.left - PAD;
    const y = event.clientY - box.top - PAD + this.element.scrollTop;
    const column = Math.floor(x / this.step);
    const place = Math.floor(y / this.step) * this.columns + column;
    return column >= 0 && column < this.columns && place >= 0 && place < this.blocks.length ? place : -1;
  }

  #hover(place) {
    if (place === this.#hovered) return;
    this.#hovered = place;
    this.element.style.cursor = place < 0 ? "" : "pointer";
    if (place < 0) hideTip(this);
    else this.#tell(place);
    this.#draw();
  }

  #tell(place) {
    const block = this.blocks[place];
    const box = this.element.getBoundingClientRect();
    const [x, y] = this.#corner(place, this.element.scrollTop);
    const [left, top] = [box.left + x, box.top + y];
    showTip(this, { left, top, bottom: top + this.cell, width: this.cell }, [block.cidr, ...blockWords(block)]);
    this.chosen(block);
  }

  /** Moves the cursor to a block, and scrolls it into view. */
  #point(place) {
    if (this.blocks.length === 0) return;
    this.#at = Math.min(Math.max(place, 0), this.blocks.length - 1);
    const y = Math.floor(this.#at / this.columns) * this.step;
    const { scrollTop } = this.element;
    if (y < scrollTop) this.element.scrollTop = y;
    else if (y + this.cell + 2 * PAD > scrollTop + this.seen) this.element.scrollTop = y + this.cell + 2 * PAD - this.seen;
    this.#tell(this.#at);
    this.#draw();
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.seen / this.step)) * this.columns;
    const moves = {
      ArrowLeft: this.#at - 1, ArrowRight: this.#at + 1, ArrowUp: this.#at - this.columns, ArrowDown: this.#at + this.columns,
      Home: 0, End: this.blocks.length - 1, PageUp: this.#at - page, PageDown: this.#at + page,
    };
    if (event.key === "Enter" && this.blocks.length) {
      event.preventDefault();
      this.open(this.blocks[this.#at]);
    } else if (event.key in moves) {
      event.preventDefault();
      const wanted = moves[event.key];
      const isStep = event.key === "ArrowUp" || event.key === "ArrowDown";
      if (!isStep || (wanted >= 0 && wanted < this.blocks.length)) this.#point(wanted);
    }
  }
}
