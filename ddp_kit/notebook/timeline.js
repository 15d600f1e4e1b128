// A timeline to zoom into. All data is in the page, so it works without the kernel. This file is the
// last part of a module that begins with MOST_LINES, timeline_words.js and timeline_drawing.js.

const NAMES = ["in a send", "in a receive", "in a collective", "under way: called, not yet complete"];
const HELP = "Scroll to zoom and drag to move. Click an event to mark it on every rank. "
  + "Keys: + and − zoom, ← and → move, Home shows all, Shift with an arrow goes to the next event.";

export default { render };

function render({ model, el }) {
  const data = read(model);
  const page = build(el, data);
  const view = new View(data, page);
  return () => view.close();
}

// ---- the page

function build(el, data) {
  const make = (parent, tag, name = "", text = "") => {
    const made = parent.appendChild(document.createElement(tag));
    made.className = name;
    made.textContent = text;
    return made;
  };
  const root = make(el, "div", "ddp-kit-timeline");
  root.dataset.lmSuppressShortcuts = "true"; // else JupyterLab takes the keys
  const bar = make(root, "div", "bar"), buttons = make(bar, "span");
  const button = (text, label) => {
    const made = make(buttons, "button", "", text);
    made.title = label;
    made.setAttribute("aria-label", label);
    return made;
  };
  const page = { root, make, into: button("+", "zoom in"), out: button("−", "zoom out") };
  page.all = button("whole run", "show the whole run");
  const shown = new Set(data.kind);
  if (data.flight.some((over, i) => over > data.start[i])) shown.add(3);
  page.swatches = ["not in a call", ...NAMES].map((name, number) => {
    if (number && !shown.has(number - 1)) return null;
    const entry = make(bar, "span"), swatch = make(entry, "i");
    entry.append(name);
    return swatch;
  });
  page.span = make(bar, "span", "span");
  page.canvas = make(make(root, "div", "lanes"), "canvas");
  page.canvas.tabIndex = 0;
  page.canvas.setAttribute("role", "application");
  page.canvas.setAttribute("aria-label", `Timeline of ${data.lanes.length} ranks. ${HELP}`);
  page.whole = make(root, "div", "whole");
  page.thumb = make(page.whole, "div");
  page.whole.title = "the whole run; the dark part is shown above";
  page.note = make(root, "div", "note", HELP);
  page.note.setAttribute("role", "status");
  page.tip = make(root, "div", "tip");
  return page;
}

// ---- the view

class View extends Drawing {
  constructor(data, page) {
    super();
    Object.assign(this, { data, page, marked: [], late: null, frame: 0, width: 0 });
    const n = data.lanes.length;
    this.lane = Math.max(4, Math.min(46, 440 / n)); // pixels
    this.height = TOP + n * this.lane + 6;
    page.canvas.style.height = `${this.height}px`;
    const pad = 0.01 * data.whole;
    this.limits = [-pad, data.whole + pad];
    [this.begin, this.end] = this.limits;
    // An import or a data set at the beginning may take most of the time: start where events do.
    const first = data.start.reduce((a, b) => Math.min(a, b), Infinity), rest = data.whole - first;
    if (rest < first && rest > 0) this.begin = first - 0.05 * rest;
    this.ends = new AbortController(); // removes all listeners
    const on = (target, name, call, options) =>
      target.addEventListener(name, call, { signal: this.ends.signal, ...options });
    const { canvas } = page;
    on(canvas, "wheel", event => this.wheel(event), { passive: false });
    // A scroll of the page that reaches the canvas goes on as one; it does not become a zoom.
    on(window, "wheel", event => {
      const fresh = performance.now() - (this.scrolled ?? -Infinity) > 250;
      if (!canvas.contains(event.target) || !fresh) this.scrolled = performance.now();
    }, { capture: true, passive: true });
    on(canvas, "pointerdown", event => this.press(event));
    on(canvas, "pointermove", event => this.move(event));
    on(canvas, "pointerup", event => this.release(event));
    on(canvas, "pointercancel", () => { this.drag = null; });
    on(canvas, "pointerleave", () => this.tip(null));
    on(canvas, "dblclick", () => this.show(...this.limits));
    on(canvas, "keydown", event => this.key(event));
    on(page.into, "click", () => this.zoom(0.5));
    on(page.out, "click", () => this.zoom(2));
    on(page.all, "click", () => this.show(...this.limits));
    for (const name of ["pointerdown", "pointermove"]) on(page.whole, name, event => this.jump(event));
    this.resized = new ResizeObserver(() => this.redraw());
    this.resized.observe(canvas);
    this.themed = new MutationObserver(() => this.redraw());
    for (const place of [document.documentElement, document.body]) {
      this.themed.observe(place, { attributes: true }); // which say what the theme is
    }
    on(matchMedia("(prefers-color-scheme: dark)"), "change", () => this.redraw());
  }

  close() {
    this.ends.abort();
    this.resized.disconnect();
    this.themed.disconnect();
    cancelAnimationFrame(this.frame);
  }

  // ---- what is visible

  show(begin, end) {
    const [low, high] = this.limits, span = Math.min(Math.max(end - begin, SHORTEST), high - low);
    this.begin = Math.min(Math.max(begin, low), high - span);
    this.end = this.begin + span;
    this.redraw();
  }

  zoom(factor, at = (this.begin + this.end) / 2) {
    const [low, high] = this.limits;
    const span = Math.min(Math.max((this.end - this.begin) * factor, SHORTEST), high - low);
    const begin = at - (at - this.begin) * span / (this.end - this.begin);
    this.show(begin, begin + span);
  }

  shift(share) {
    const by = share * (this.end - this.begin);
    this.show(this.begin + by, this.end + by);
  }

  wheel(event) {
    if (performance.now() - (this.scrolled ?? -Infinity) < 250) return;
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const by = (event.deltaY || event.deltaX) * (event.deltaMode ? 20 : 1);
    const all = this.end - this.begin >= this.limits[1] - this.limits[0];
    if (all && (sideways || by > 0)) return; // nothing to show: let the page scroll
    event.preventDefault();
    if (sideways) this.shift((event.deltaX || event.deltaY) / this.width);
    else this.zoom(Math.exp(Math.max(-200, Math.min(200, by)) / 300), this.t(event.offsetX));
    this.tip(null);
  }

  press(event) {
    if (event.button) return;
    this.page.canvas.setPointerCapture(event.pointerId);
    this.drag = { x: event.offsetX, begin: this.begin, end: this.end, moved: false };
  }

  move(event) {
    if (!this.drag) return this.tip(event);
    const by = event.offsetX - this.drag.x;
    this.drag.moved ||= Math.abs(by) > 3;
    if (!this.drag.moved) return;
    this.tip(null);
    this.show(this.drag.begin - by / this.scale, this.drag.end - by / this.scale);
  }

  release(event) {
    const click = this.drag && !this.drag.moved;
    this.drag = null;
    if (!click) return;
    const found = this.find(event.offsetX, event.offsetY);
    if (found?.length > 1) { // too close to choose from: zoom in on them
      const begin = Math.min(...found.map(i => this.data.from[i]));
      const end = Math.max(...found.map(i => this.data.to[i]));
      this.show(begin - 0.3 * (end - begin), end + 0.3 * (end - begin));
    } else this.mark(found?.[0]);
  }

  jump(event) {
    if (event.type === "pointerdown") this.page.whole.setPointerCapture(event.pointerId);
    else if (!event.buttons) return;
    const box = this.page.whole.getBoundingClientRect(), [low, high] = this.limits;
    const middle = low + (event.clientX - box.left) / box.width * (high - low);
    this.show(middle - (this.end - this.begin) / 2, middle + (this.end - this.begin) / 2);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const across = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const down = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.shiftKey && (across || down)) this.step(across ?? 0, down ?? 0);
    else if (across) this.shift(0.2 * across);
    else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "Home") this.show(...this.limits);
    else if (event.key === "Escape") this.mark();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // ---- what is under the pointer, and what is marked

  find(x, y) { // the event at a place; several, if they are too close to choose from; or null
    const { data } = this, rank = Math.floor((y - TOP) / this.lane);
    if (rank < 0 || rank >= data.lanes.length || x < LEFT) return null;
    const t = this.t(x), { scale } = this, low = y > this.y(rank) + this.half - 6;
    let best = -1, least = 4; // pixels
    const close = [];
    for (let i = data.first[rank]; i < data.first[rank + 1]; i++) {
      const away = Math.max(data.from[i] - t, t - data.to[i], 0) * scale;
      const inFlight = low && data.start[i] <= t && t <= data.flight[i];
      if (away < BIN && (data.to[i] - data.from[i]) * scale < BIN) close.push(i);
      if ((inFlight ? -1 : away) <= least) [best, least] = [i, inFlight ? -1 : away];
    }
    if (close.length > 1 && close.includes(best)) return close;
    return best < 0 ? null : [best];
  }

  step(across, down) { // from the chosen event to the next one of its rank, or of the next rank
    const { data } = this, { first } = data;
    if (!data.count) return;
    let next = this.chosen ?? data.from.findIndex(t => t >= this.begin);
    if (next < 0) next = 0;
    else if (this.chosen !== undefined) {
      let rank = data.rank[next];
      if (across) next = Math.max(first[rank], Math.min(first[rank + 1] - 1, next + across));
      do rank += down; while (down && data.lanes[rank]?.events === 0);
      if (down && data.lanes[rank]) {
        const t = data.start[next], away = i => Math.abs(data.start[i] - t);
        next = first[rank];
        for (let i = next; i < first[rank + 1]; i++) if (away(i) < away(next)) next = i;
      }
    }
    const t = data.from[next], span = this.end - this.begin;
    if (t < this.begin || t > this.end) this.show(t - span / 2, t + span / 2);
    this.mark(next);
  }

  mark(i) { // mark an event on every rank; without one, mark nothing
    const { data, page } = this;
    this.chosen = i;
    this.marked = i === undefined ? [] : members(data, i);
    const [title, text, late] = i === undefined ? ["", HELP, null] : explain(data, this.marked);
    this.late = late;
    page.note.replaceChildren();
    page.make(page.note, "b", "", title);
    page.note.append(` ${text}`);
    page.root.dataset.marked = this.marked.map(j => data.rank[j]).join(" ");
    page.root.dataset.late = late === null ? "" : data.rank[late];
    this.redraw();
  }

  tip(event) {
    const { tip, root, make, canvas } = this.page, { data } = this;
    const found = event && this.find(event.offsetX, event.offsetY);
    canvas.style.cursor = found ? "pointer" : "";
    tip.style.display = found ? "block" : "none";
    if (!found) return;
    tip.replaceChildren();
    if (found.length > 1) {
      const counts = {};
      for (const { op } of found.map(i => data.calls[data.call[i]])) counts[op] = (counts[op] ?? 0) + 1;
      make(tip, "b", "", `${found.length} events on rank ${data.rank[found[0]]}`);
      make(tip, "div", "", Object.entries(counts).map(([op, n]) => `${n} × ${op}`).join(", "));
      make(tip, "div", "", "Zoom in, or click, to see each of them.");
    } else for (const [text, tag] of describe(data, found[0])) make(tip, tag, "", text);
    const box = root.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const right = x + 14 + tip.offsetWidth < box.width, below = y + 14 + tip.offsetHeight < box.height;
    tip.style.left = `${Math.max(0, right ? x + 14 : x - 14 - tip.offsetWidth)}px`;
    tip.style.top = `${Math.max(0, below ? y + 14 : y - 10 - tip.offsetHeight)}px`;
  }
}
