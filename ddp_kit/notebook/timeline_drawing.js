// Draws a timeline on a canvas. View, in timeline.js, says which part of the run.

const LEFT = 66, TOP = 24, RIGHT = 10; // pixels around the lanes; timeline.css has the sides too
const BIN = 2; // pixels; shorter events are drawn together, as shares of these
const CLOSE = 5; // pixels; lines of collectives that are closer than this would cover the bars
const LIGHT = {
  noCall: "#e3e8ee", fill: ["#454545", "#bdb3f3", "#8fcdc1"], edge: ["#222222", "#6a5acd", "#2b7f73"],
  text: ["#ffffff", "#262626", "#262626"], late: "#882255", grid: "#00000014",
};
const DARK = {
  noCall: "#3a424c", fill: ["#d6d6d6", "#5b51a8", "#22705f"], edge: ["#ffffff", "#aaa1f5", "#5fcabb"],
  text: ["#111111", "#ffffff", "#ffffff"], late: "#ff8fc4", grid: "#ffffff1c",
};

class Drawing {
  // begin, end: what is visible, in ns; width, height, lane: in pixels; marked, late: rows.
  get scale() { return (this.width - LEFT - RIGHT) / (this.end - this.begin); } // pixels of 1 ns
  x(t) { return LEFT + (t - this.begin) * this.scale; }
  t(x) { return this.begin + (x - LEFT) / this.scale; }
  y(rank) { return TOP + (rank + 0.5) * this.lane; }
  get half() { return Math.max(1.5, 0.36 * this.lane); } // of a bar's height

  redraw() { this.frame ||= requestAnimationFrame(() => { this.frame = 0; this.draw(); }); }

  draw() {
    const { page, data } = this, { canvas } = page, density = window.devicePixelRatio || 1;
    this.width = canvas.clientWidth;
    if (this.width <= LEFT + RIGHT) return; // not on the page, or hidden
    const [wide, high] = [this.width * density, this.height * density].map(Math.round);
    if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
    const style = getComputedStyle(page.root), paper = style.backgroundColor;
    const [r, g, b] = paper.match(/[\d.]+/g) ?? [255, 255, 255];
    const colors = { ...(0.3 * r + 0.59 * g + 0.11 * b < 128 ? DARK : LIGHT), ink: style.color, paper };
    const pen = canvas.getContext("2d");
    this.pen = pen;
    this.colors = colors;
    this.labels = [];
    pen.setTransform(density, 0, 0, density, 0, 0);
    pen.font = `11px ${style.fontFamily}`;
    pen.textBaseline = "middle";
    pen.clearRect(0, 0, this.width, this.height);
    this.axis();
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, this.width - LEFT - RIGHT, this.height);
    pen.clip();
    const seen = { events: 0, sends: [], collectives: new Set() };
    data.lanes.forEach((lane, rank) => this.drawLane(lane, rank, seen));
    this.drawLines(seen);
    this.write();
    if (this.marked.some(i => data.to[i] >= this.begin && data.start[i] <= this.end)) this.drawMarked();
    this.write();
    pen.restore();
    this.names();
    page.swatches.forEach((swatch, number) => {
      if (!swatch) return;
      swatch.style.background = colors.fill[number - 1] ?? colors.noCall;
      swatch.style.borderColor = colors.edge[number - 1] ?? colors.noCall;
      if (number === 4) swatch.style.borderBottom = `4px solid ${colors.edge[2]}`;
    });
    const [low, top] = this.limits, share = t => `${100 * (t - low) / (top - low)}%`;
    page.thumb.style.left = share(this.begin);
    page.thumb.style.width = share(low + this.end - this.begin);
    page.span.textContent = `${time(this.end - this.begin)}, ${seen.events.toLocaleString("en")} events`;
    page.root.dataset.view = `${this.begin} ${this.end}`;
  }

  axis() {
    const { pen, colors } = this, span = this.end - this.begin;
    const rough = span / Math.max(2, (this.width - LEFT) / 95), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough);
    const [unit, size] = UNITS.find(([, size]) => this.end >= size) ?? ["ns", 1];
    const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
    pen.textAlign = "center";
    for (let t = Math.ceil(Math.max(0, this.begin) / step) * step; t <= this.end; t += step) {
      const x = this.x(t);
      if (x > this.width - RIGHT - 18) break;
      pen.fillStyle = colors.grid;
      pen.fillRect(x, TOP - 4, 1, this.height - TOP);
      pen.fillStyle = colors.ink;
      pen.fillText(`${(t / size).toFixed(digits)} ${unit}`, x, 10);
    }
  }

  names() {
    const { pen, data } = this, high = Math.min(18, this.lane), each = Math.ceil(13 / this.lane);
    pen.textAlign = "center";
    data.lanes.forEach((lane, rank) => {
      pen.fillStyle = lane.color;
      pen.fillRect(2, this.y(rank) - high / 2, LEFT - 10, high);
      pen.fillStyle = lane.ink;
      if (rank % each === 0) pen.fillText(`rank ${rank}`, 2 + (LEFT - 10) / 2, this.y(rank) + 0.5);
    });
  }

  drawLane(lane, rank, seen) {
    const { pen, colors, data, half, begin, end } = this, y = this.y(rank);
    pen.fillStyle = colors.noCall;
    this.box(lane.begin, lane.end, y - half, 2 * half);
    const bins = Math.ceil((this.width - LEFT) / BIN);
    const shares = new Float32Array(3 * bins), counts = new Uint32Array(3 * bins);
    const { scale } = this, strip = Math.min(4, half), under = [];
    let drawn = -1; // the pixel at which the last strip ended
    for (let i = data.first[rank]; i < data.first[rank + 1]; i++) {
      if (data.start[i] > end || Math.max(data.to[i], data.flight[i]) < begin) continue;
      seen.events++;
      const kind = data.kind[i], partner = data.partner[i];
      if (kind === 0 && partner >= 0 && seen.sends.length <= MOST_LINES) seen.sends.push(i);
      if (kind === 2 && seen.collectives.size <= MOST_LINES) seen.collectives.add(partner);
      const over = this.x(Math.min(data.flight[i], end));
      if ((data.flight[i] - data.start[i]) * scale > 1 && over > drawn + 0.5) {
        under.push(i);
        drawn = over;
      }
      if (data.from[i] > end || data.to[i] < begin) continue;
      const wide = (data.to[i] - data.from[i]) * scale;
      if (wide >= BIN) {
        this.bar(i);
        continue;
      }
      const bin = 3 * Math.max(0, Math.min(bins - 1, Math.floor((this.x(data.from[i]) - LEFT) / BIN))) + kind;
      shares[bin] += wide / BIN;
      counts[bin]++;
    }
    for (let bin = 0; bin < bins; bin++) {
      const all = counts[3 * bin] + counts[3 * bin + 1] + counts[3 * bin + 2];
      let floor = y + half;
      for (let kind = 0; all && kind < 3; kind++) {
        if (!counts[3 * bin + kind]) continue;
        // A single event is visible however short it is; many are drawn as their share of time.
        const share = all === 1 ? 1 : shares[3 * bin + kind], room = floor - (y - half);
        const high = Math.min(room, Math.max(2, 2 * half * share));
        pen.fillStyle = all === 1 ? colors.edge[kind] : colors.fill[kind];
        pen.fillRect(LEFT + bin * BIN, floor - high, BIN, high);
        floor -= high;
      }
    }
    for (const i of under) { // over the bars, which are often the waits for these
      pen.fillStyle = colors.edge[data.kind[i]];
      this.box(data.start[i], data.flight[i], y + half - strip, strip);
    }
  }

  box(from, to, y, high) {
    const left = Math.max(LEFT - 2, this.x(from)), right = Math.min(this.width, this.x(to));
    if (right > left) this.pen.fillRect(left, y, right - left, high);
  }

  bar(i) {
    const { pen, colors, data, half } = this, kind = data.kind[i], y = this.y(data.rank[i]);
    const left = Math.max(LEFT - 2, this.x(data.from[i])), right = Math.min(this.width, this.x(data.to[i]));
    const wide = right - left, open = Number.isNaN(data.end[i]) || data.partner[i] === NEVER;
    pen.fillStyle = colors.fill[kind];
    pen.fillRect(left, y - half, wide, 2 * half);
    if (wide > 3) {
      pen.strokeStyle = open ? colors.late : colors.edge[kind];
      pen.setLineDash(open ? [4, 3] : []);
      pen.lineWidth = open ? 2 : 1;
      pen.strokeRect(left + 0.5, y - half + 0.5, wide - 1, 2 * half - 1);
      pen.setLineDash([]);
    }
    const { op } = data.calls[data.call[i]], lost = data.partner[i] === NEVER;
    const text = open ? `${op}: never ${lost ? ["received", "sent"][kind] : "ended"}` : op;
    if (half > 6 && wide > 6.5 * text.length + 8) this.labels.push([text, (left + right) / 2, y, kind]);
  }

  write() { // the names in the bars, over the lines that cross them
    const { pen, colors } = this;
    pen.textAlign = "center";
    for (const [text, x, y, kind] of this.labels.splice(0)) {
      const wide = pen.measureText(text).width + 6;
      pen.fillStyle = colors.fill[kind];
      pen.fillRect(x - wide / 2, y - 7, wide, 14);
      pen.fillStyle = colors.text[kind];
      pen.fillText(text, x, y);
    }
  }

  drawLines(seen) { // of messages and collectives, if they are few
    const { pen, colors, data } = this;
    if (seen.sends.length <= MOST_LINES) {
      for (const i of seen.sends) this.arrow(i, data.partner[i], data.lanes[data.rank[i]].color, 1.5);
    }
    if (seen.collectives.size > MOST_LINES) return;
    const found = [...seen.collectives].map(number => data.collectives[number]);
    const lines = found.map(({ last, low, high }) => [this.x(last), low, high]).sort((a, b) => a[0] - b[0]);
    pen.lineWidth = 1.5;
    pen.strokeStyle = colors.edge[2];
    pen.beginPath();
    lines.forEach(([x, low, high], i) => {
      if (x - (lines[i - 1]?.[0] ?? -Infinity) < CLOSE || (lines[i + 1]?.[0] ?? Infinity) - x < CLOSE) return;
      pen.moveTo(x, this.y(low));
      pen.lineTo(x, this.y(high));
    });
    pen.stroke();
  }

  arrow(send, recv, color, wide) {
    const { pen, data, half } = this, side = Math.sign(data.rank[recv] - data.rank[send]) * half;
    const [x, y] = [this.x(data.start[send]), this.y(data.rank[send]) + side];
    const done = Math.max(data.to[recv], data.flight[recv], data.start[send]);
    const [to, at] = [this.x(done), this.y(data.rank[recv]) - side];
    const turn = Math.atan2(at - y, to - x);
    pen.strokeStyle = pen.fillStyle = color;
    pen.lineWidth = wide;
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(to, at);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(to, at);
    for (const bend of [-0.4, 0.4]) pen.lineTo(to - 8 * Math.cos(turn + bend), at - 8 * Math.sin(turn + bend));
    pen.fill();
  }

  drawMarked() { // all else is faded
    const { pen, colors, data, marked, half, late } = this;
    pen.globalAlpha = 0.65;
    pen.fillStyle = colors.paper;
    pen.fillRect(LEFT, TOP - 4, this.width, this.height);
    pen.globalAlpha = 1;
    for (const i of marked) {
      this.bar(i);
      pen.fillStyle = pen.strokeStyle = i === late ? colors.late : colors.ink;
      pen.lineWidth = 2;
      const left = this.x(data.from[i]), wide = Math.max(3, this.x(data.to[i]) - left);
      pen.strokeRect(left - 1, this.y(data.rank[i]) - half - 1, wide + 2, 2 * half + 2);
      pen.beginPath();
      pen.arc(this.x(data.start[i]), this.y(data.rank[i]), Math.min(5, half), 0, 7);
      pen.fill();
    }
    if (data.kind[marked[0]] === 2) {
      const { last, low, high } = data.collectives[data.partner[marked[0]]];
      pen.fillStyle = colors.late;
      pen.fillRect(this.x(last) - 1, this.y(low), 2, this.y(high) - this.y(low));
    } else if (marked.length === 2) {
      const [send, recv] = data.kind[marked[0]] === 0 ? marked : [marked[1], marked[0]];
      this.arrow(send, recv, colors.ink, 2.5);
    }
    if (late === null) return;
    const x = this.x(data.start[late]), right = x + 110 < this.width;
    pen.fillStyle = colors.late;
    pen.textAlign = right ? "left" : "right";
    pen.fillText(`rank ${data.rank[late]} came last`, x + (right ? 9 : -9), this.y(data.rank[late]) - half - 6);
  }
}
