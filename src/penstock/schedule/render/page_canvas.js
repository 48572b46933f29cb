// One panel on its canvas: a row of ops for each rank, and below it what the rank holds.

const LEFT = 70;
const RIGHT = 128; // for each rank's bubble and peak
const NARROW = 640; // a canvas below this has no room for them
const TOP = 20;
const AXIS = 24;
const FONT = "-apple-system, BlinkMacSystemFont, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif";
const DIMMED = 0.25;
const DIGIT = 0.58; // width of a digit, in heights

class Picture {
  constructor(panel, section) {
    this.panel = panel;
    this.canvas = section.querySelector("canvas");
    this.hair = section.querySelector(".hair");
    this.context = this.canvas.getContext("2d");
    this.count = panel.rank.length;
    this.firsts = []; // of rank r's ops, and one more
    for (let rank = 0; rank <= panel.ranks; rank++) {
      this.firsts.push(firstPlace(0, this.count, (at) => panel.rank[at] >= rank));
    }
    this.places = new Map(panel.rank.map((_, at) => [this.textOf(at), at]));
    this.waits = new Map(panel.waits.map(([at, start, turn, end]) => [at, { start, turn, end }])); // by op
    this.sideBySide = new Set(panel.sideBySide); // ops that share their rank's row: forwards above, backwards below
    this.partner = new Map(panel.pairs.flatMap(([one, other]) => [[one, other], [other, one]]));
    const lengths = panel.start.map((start, at) => panel.end[at] - start).sort((a, b) => a - b);
    this.shortest = lengths.find((length) => length > 0) || whole;
    this.usual = lengths[this.count >> 1] || 0;
    this.longestText = [...this.places.keys()].reduce((most, text) => Math.max(most, text.length), 1);
    this.digits = String(panel.microbatch.reduce((a, b) => Math.max(a, b), 0)).length;
    this.mostHeld = 0;
    this.setCritical(panel.critical);
  }

  setCritical(path) {
    this.path = path;
    this.criticals = new Set(path);
  }

  textOf(at) {
    const { stage, kind, microbatch } = this.panel;
    return `${stage[at]}${kind[at]}${microbatch[at]}`;
  }

  /** Fit the canvas to the page's width and the number of ranks. */
  resize(view, showsHeld) {
    const { ranks } = this.panel;
    this.row = clamp(Math.floor(280 / ranks), 10, 26);
    this.strip = showsHeld && this.mostHeld ? clamp(Math.floor(this.row * 0.85), 10, 22) : 0;
    this.pitch = this.row + (this.strip ? this.strip + 3 : 0) + (this.row > 16 ? 7 : 4);
    this.width = this.canvas.parentElement.clientWidth;
    this.height = TOP + this.pitch * ranks + AXIS;
    this.right = this.width - (this.width < NARROW ? 14 : RIGHT);
    const density = window.devicePixelRatio || 1;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(this.width * density);
    this.canvas.height = Math.round(this.height * density);
    this.context.setTransform(density, 0, 0, density, 0, 0);
    this.view = view;
  }

  get pixels() {
    return (this.right - LEFT) / this.view.length;
  }

  x(moment) {
    return LEFT + (moment - this.view.from) * this.pixels;
  }

  moment(x) {
    return this.view.from + (x - LEFT) / this.pixels;
  }

  top(rank) {
    return TOP + rank * this.pitch;
  }

  /** Where an op is drawn, on the canvas. */
  boxOf(at) {
    const { rank, start, end } = this.panel;
    const x = this.x(start[at]);
    return { x, width: this.x(end[at]) - x, ...this.rowOf(at, this.top(rank[at])) };
  }

  /** Of that rank's row, the part that is the op's. */
  rowOf(at, y) {
    if (!this.sideBySide.has(at)) return { y, height: this.row };
    const height = Math.floor(this.row / 2);
    return { y: this.isAbove(at) ? y : y + this.row - height, height };
  }

  isAbove(at) {
    return this.panel.kind[at] === "F";
  }

  /** What lies under a point: a rank, whether its ops or what it holds, and the op if there is one. */
  under(x, y) {
    const rank = Math.floor((y - TOP + 3) / this.pitch);
    if (rank < 0 || rank >= this.panel.ranks || x < LEFT || x > this.right) return null;
    const moment = this.moment(x);
    if (moment > this.panel.makespan) return null;
    const inStrip = this.strip > 0 && y > this.top(rank) + this.row + 2;
    const { start, end } = this.panel;
    const next = firstPlace(this.firsts[rank], this.firsts[rank + 1], (at) => end[at] > moment);
    const here = (at) => {
      const { y: top, height } = this.rowOf(at, this.top(rank));
      return start[at] <= moment && moment < end[at] && (!this.sideBySide.has(at) || (y >= top && y <= top + height));
    };
    // ops side by side neither begin nor end in order
    const near = [next, next - 1, next + 1].filter((at) => at >= this.firsts[rank] && at < this.firsts[rank + 1]);
    const op = inStrip ? null : (near.find(here) ?? null);
    const reduction = this.panel.reductions.find(([of, , from, to]) => of === rank && from <= moment && moment < to);
    return { rank, moment, inStrip, op, next, reduction: inStrip ? undefined : reduction };
  }

  /** What the rank holds at a time. */
  heldAt(rank, moment) {
    const curve = this.panel.curves[rank];
    const after = firstPlace(0, curve.length, (at) => curve[at][0] > moment);
    return after ? curve[after - 1][1] : 0;
  }

  draw(state, colours) {
    const context = this.context;
    this.colours = colours;
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, this.width, this.height);
    this.drawTicks();
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, this.right - LEFT, this.height - AXIS + 4);
    context.clip();
    this.drawIdle();
    this.drawOps(state);
    if (this.strip) this.drawHeld();
    context.globalAlpha = this.chosen(state) ? DIMMED : 1; // or they would be taken for what is chosen
    this.drawPairs();
    context.globalAlpha = 1;
    if (state.critical) this.drawCriticalPath();
    if (state.op !== null && state.picture === this) this.outline(this.boxOf(state.op), 2);
    context.restore();
    this.drawFigures();
  }

  drawTicks() {
    const { context, colours } = this;
    const size = drawing.unit.size;
    const step = nice((this.view.length / size / (this.right - LEFT)) * 80);
    const decimals = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
    const bottom = this.height - AXIS;
    this.text("end", 12, colours.faint);
    context.fillText(drawing.unit.name ? `time, ${drawing.unit.name}` : "time", LEFT - 10, bottom + 16);
    context.textAlign = "center";
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    const last = Math.floor(this.view.to / size / step + 1e-6);
    for (let count = Math.ceil(this.view.from / size / step - 1e-6); count <= last; count++) {
      const x = Math.round(this.x(count * step * size)) + 0.5;
      context.beginPath();
      context.moveTo(x, TOP - 5);
      context.lineTo(x, bottom + 4);
      context.stroke();
      context.fillText(number(count * step, decimals), x, bottom + 16);
    }
  }

  drawIdle() {
    const { context, colours } = this;
    const from = this.x(0);
    const width = this.x(this.panel.makespan) - from;
    for (let rank = 0; rank < this.panel.ranks; rank++) {
      context.beginPath();
      context.fillStyle = colours.idle;
      context.roundRect(from, this.top(rank), width, this.row, 2);
      context.fill();
      this.drawWaits(rank);
    }
    for (const [rank, , start, end] of this.panel.reductions) this.drawReduction(rank, start, end);
  }

  drawReduction(rank, start, end) {
    this.drawWait(rank, start, end, drawing.reduction.fill);
    const [left, right] = [Math.max(this.x(start), LEFT), Math.min(this.x(end), this.right)];
    if (right - left < 12) return;
    this.text("center", 11, "#ffffff");
    this.context.fillText(drawing.reduction.letter, (left + right) / 2, this.top(rank) + this.row / 2 + 4);
  }

  /** For a peer's compute, then for the wire. */
  drawWaits(rank) {
    const { waits } = this.panel;
    const [first, beyond] = this.inView(rank);
    for (let place = firstPlace(0, waits.length, (at) => waits[at][0] >= first); place < waits.length; place++) {
      const [at, start, turn, end] = waits[place];
      if (at > Math.min(beyond, this.firsts[rank + 1] - 1)) return;
      this.drawWait(rank, start, turn, this.colours.peer);
      this.drawWait(rank, turn, end, this.colours.wire);
    }
  }

  drawWait(rank, from, to, colour) {
    if (to <= from) return;
    const width = (to - from) * this.pixels;
    const gap = width > 5 ? 1 : 0;
    this.context.fillStyle = colour;
    this.context.fillRect(this.x(from) + gap / 2, this.top(rank), Math.max(width - gap, 0.5), this.row);
  }

  drawOps(state) {
    const chosen = this.chosen(state);
    this.context.globalAlpha = chosen ? DIMMED : 1;
    for (let rank = 0; rank < this.panel.ranks; rank++) {
      const [first, beyond] = this.inView(rank);
      const drawnTo = [-Infinity, -Infinity]; // in the row's upper half, and in its lower one
      for (let at = first; at < beyond; at++) {
        const to = this.x(this.panel.end[at]);
        const halves = this.sideBySide.has(at) ? [this.isAbove(at) ? 0 : 1] : [0, 1];
        const from = Math.max(...halves.map((half) => drawnTo[half]));
        if (to - from < 0.5) continue; // lost in the pixel that is drawn already
        this.drawOp(at, Math.max(this.x(this.panel.start[at]), from));
        for (const half of halves) drawnTo[half] = to;
      }
    }
    this.context.globalAlpha = 1;
    if (!chosen) return;
    for (let rank = 0; rank < this.panel.ranks; rank++) {
      const [first, beyond] = this.inView(rank);
      for (let at = first; at < beyond; at++) if (chosen(at)) this.drawOp(at, this.x(this.panel.start[at]));
    }
  }

  /** Which ops stand out, if not all do: the hovered one's microbatch, else the critical path. */
  chosen(state) {
    if (state.microbatch !== null) return (at) => this.panel.microbatch[at] === state.microbatch;
    if (state.critical && this.criticals.size) return (at) => this.criticals.has(at);
    return null;
  }

  inView(rank) {
    const { start, end } = this.panel;
    const [low, high] = [this.firsts[rank], this.firsts[rank + 1]];
    return [
      firstPlace(low, high, (at) => end[at] >= this.view.from),
      firstPlace(low, high, (at) => start[at] > this.view.to),
    ];
  }

  drawOp(at, from) {
    const { context, panel } = this;
    const width = this.x(panel.end[at]) - from;
    const { y, height } = this.rowOf(at, this.top(panel.rank[at]));
    const shade = drawing.shades[panel.shade[at]];
    const gap = width > 5 ? 1 : 0;
    context.fillStyle = shade.fill;
    if (width > 6) {
      context.beginPath();
      context.roundRect(from + gap / 2, y, width - gap, height, Math.min(3, width / 6));
      context.fill();
    } else {
      context.fillRect(from, y, Math.max(width - gap, 0.5), height);
    }
    this.label(at, from, width, y, height, shade);
  }

  /** The op's text in full where it fits a usual op, else its microbatch alone. */
  label(at, from, width, y, height, shade) {
    const full = this.row >= 16 && this.longestText * DIGIT * 11 + 8 <= this.usual * this.pixels;
    const characters = full ? this.longestText : this.digits;
    // an op that is cut off at the edge keeps its label in view
    const [left, right] = [Math.max(from, LEFT), Math.min(from + width, this.right)];
    // any label of this kind must fit: like ops are then labelled all or none
    const size = [11, 9].find((size) => characters * DIGIT * size + 2 <= right - left && size + 2 <= height);
    if (!size) return;
    const text = full ? this.textOf(at) : this.panel.microbatch[at];
    this.text("center", size, shade.onDark ? "#ffffff" : "#1f2328");
    this.context.fillText(text, (left + right) / 2, y + height / 2 + size * 0.36);
  }

  drawHeld() {
    const { context, colours, panel } = this;
    for (let rank = 0; rank < panel.ranks; rank++) {
      const floor = this.top(rank) + this.row + 2 + this.strip;
      const height = (held) => (held / this.mostHeld) * (this.strip - 2);
      context.beginPath();
      let y = floor;
      let peakAt = null;
      context.moveTo(this.x(0), y);
      for (const [moment, held] of panel.curves[rank]) {
        const x = clamp(this.x(moment), LEFT - 10, this.right + 10);
        context.lineTo(x, y);
        y = floor - height(held);
        context.lineTo(x, y);
        if (peakAt === null && held >= panel.peaks[rank] * (1 - 1e-9)) peakAt = [this.x(moment), y];
      }
      context.lineTo(this.x(panel.makespan), y);
      context.strokeStyle = colours.heldLine;
      context.lineWidth = 1;
      context.stroke();
      context.lineTo(this.x(panel.makespan), floor);
      context.closePath();
      context.fillStyle = colours.held;
      context.fill();
      if (peakAt) this.dot(...peakAt);
    }
  }

  dot(x, y) {
    this.context.beginPath();
    this.context.arc(x + 2.5, y, 2.5, 0, 2 * Math.PI);
    this.context.fillStyle = this.colours.ink;
    this.context.fill();
  }

  drawPairs() {
    for (const [one, other] of this.panel.pairs) {
      const [a, b] = [this.boxOf(one), this.boxOf(other)];
      const x = Math.min(a.x, b.x);
      const width = Math.max(a.x + a.width, b.x + b.width) - x;
      if (width > 4 && x < this.right && x + width > LEFT) {
        const y = this.top(this.panel.rank[one]);
        this.outline({ x: x + 0.8, y: y - 1.5, width: width - 1.6, height: this.row + 3 }, width > 12 ? 1.3 : 0.7);
      }
    }
  }

  drawCriticalPath() {
    const { context, path } = this;
    context.strokeStyle = this.colours.ink;
    context.lineWidth = 1.5;
    path.forEach((at, place) => {
      const box = this.boxOf(at);
      if (box.width > 3) this.outline(box, 1.5);
      if (!place) return;
      const before = this.boxOf(path[place - 1]);
      context.beginPath();
      context.moveTo(before.x + before.width, before.y + before.height / 2);
      context.lineTo(box.x, box.y + box.height / 2);
      context.stroke();
    });
  }

  outline(box, thickness) {
    const { context } = this;
    context.strokeStyle = this.colours.ink;
    context.lineWidth = thickness;
    context.beginPath();
    context.roundRect(box.x, box.y, Math.max(box.width, 1), box.height, 3);
    context.stroke();
  }

  /** Beside the rows: the rank, its bubble, and its peak. */
  drawFigures() {
    const { context, colours, panel } = this;
    const barsAt = this.right + 16;
    const end = this.width - 4;
    const figures = this.width >= NARROW;
    if (figures) {
      this.text("end", 12, colours.faint);
      context.fillText("bubble", end, TOP - 6);
    }
    for (let rank = 0; rank < panel.ranks; rank++) {
      const middle = this.top(rank) + this.row / 2;
      const size = this.row >= 14 ? 12 : 10;
      this.text("end", size, colours.ink);
      context.fillText(`rank ${rank}`, LEFT - 10, middle + 4);
      if (!figures) continue;
      context.fillText(percent(panel.bubble[rank]), end, middle + 4);
      context.fillStyle = colours.idle;
      context.fillRect(barsAt, middle - 3, 48, 7);
      context.fillStyle = colours.inner;
      context.fillRect(barsAt, middle - 3, 48 * clamp(panel.bubble[rank], 0, 1), 7);
      if (!this.strip) continue;
      this.text("end", Math.min(size, 11), colours.faint);
      context.fillText(`peak ${number(panel.peaks[rank])}`, end, this.top(rank) + this.row + this.strip);
    }
  }

  text(align, size, colour) {
    this.context.textAlign = align;
    this.context.font = `${size}px ${FONT}`;
    this.context.fillStyle = colour;
  }
}
