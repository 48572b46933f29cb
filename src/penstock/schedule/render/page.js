// Interaction: zoom, pan, hover, find.

const sections = [...document.querySelectorAll(".panel")];
const pictures = drawing.panels.map((panel, place) => new Picture(panel, sections[place]));
const view = new View(Math.min(...pictures.map((picture) => picture.shortest)));
const state = { picture: null, op: null, microbatch: null, critical: false, held: true };
const element = (id) => document.getElementById(id);
const tooltip = element("tooltip");

for (const picture of pictures) {
  picture.mostHeld = Math.max(...drawing.panels.flatMap((panel) => panel.peaks));
  // a measured step has no critical path: show where the predicted one went
  const path = pictures[0].path.map((at) => picture.places.get(pictures[0].textOf(at)));
  if (!picture.path.length) picture.setCritical(path.filter((at) => at !== undefined));
}

// --- drawing -------------------------------------------------------------------------------------

let waiting = false;
let stale = true; // whether the canvases must be fitted to the page again

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    drawNow();
  });
}

function drawNow() {
  if (stale) for (const picture of pictures) picture.resize(view, state.held);
  stale = false;
  const style = getComputedStyle(document.documentElement);
  const colours = {};
  for (const name of ["paper", "ink", "faint", "line", "idle", "held", "held-line", "inner", "peer", "wire"]) {
    const key = name.replace(/-(.)/, (_, letter) => letter.toUpperCase());
    colours[key] = style.getPropertyValue(`--${name}`).trim();
  }
  for (const picture of pictures) picture.draw(state, colours);
  const range = element("range");
  range.textContent = view.isWhole ? "the whole step" : `${time(view.from, view.length)} to ${time(view.to, view.length)}`;
  Object.assign(range.dataset, { from: view.from, to: view.to });
}

function refit() {
  stale = true;
  redraw();
}

// --- the tooltip ---------------------------------------------------------------------------------

function node(tag, text, className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

/** A heading, and pairs of a name and a value. */
function fillTooltip(heading, facts) {
  const list = document.createElement("dl");
  for (const [name, value] of facts) list.append(node("dt", name), node("dd", value));
  tooltip.replaceChildren(heading, list);
}

function describeOp(picture, at) {
  const { panel } = picture;
  const [start, end] = [panel.start[at], panel.end[at]];
  const fine = end - start || whole;
  const heading = node("div", "", "op");
  const swatch = document.createElement("i");
  swatch.style.background = drawing.shades[panel.shade[at]].fill;
  heading.append(swatch, picture.textOf(at), node("span", drawing.kinds[panel.kind[at]]));
  const facts = [
    ["stage", `${panel.stage[at]} on rank ${panel.rank[at]}`],
    ["microbatch", panel.microbatch[at]],
    ["start", time(start, fine)],
    ["end", time(end, fine)],
    ["duration", time(end - start)],
    ...stood(picture, at),
    ...comparedWithPrediction(picture, at),
  ];
  const path = panel.critical.length ? "on the critical path" : "on the predicted critical path";
  if (picture.criticals.size) facts.push([path, picture.criticals.has(at) ? "yes" : "no"]);
  if (picture.partner.has(at)) facts.push(["to overlap with", picture.textOf(picture.partner.get(at))]);
  fillTooltip(heading, facts);
}

/** How long its rank waited for the input of an op, and for what. */
function stood(picture, at) {
  const wait = picture.waits.get(at);
  if (!wait) return [];
  const parts = [["waited for a peer", wait.turn - wait.start], ["waited for the wire", wait.end - wait.turn]];
  return parts.filter(([, length]) => length > 0).map(([name, length]) => [name, time(length)]);
}

function comparedWithPrediction(picture, at) {
  const before = pictures[0];
  const there = before.places.get(picture.textOf(at));
  if (picture === before || there === undefined) return [];
  const { start, end } = before.panel;
  const length = end[there] - start[there];
  const later = picture.panel.start[at] - start[there];
  const longer = (picture.panel.end[at] - picture.panel.start[at]) / length - 1;
  return [
    ["predicted start", `${time(start[there], length || whole)} (${later < 0 ? "−" : "+"}${time(Math.abs(later))})`],
    ["predicted duration", length ? `${time(length)} (${longer < 0 ? "" : "+"}${percent(longer)})` : time(length)],
  ];
}

function describeReduction(picture, [rank, stage, start, end]) {
  fillTooltip(node("b", drawing.reduction.name), [
    ["stage", `${stage} on rank ${rank}`],
    ["start", time(start, end - start)],
    ["end", time(end, end - start)],
    ["duration", time(end - start)],
  ]);
}

function describeIdle(picture, { rank, moment, next }) {
  const { start, end, makespan, reductions } = picture.panel;
  const last = picture.firsts[rank + 1];
  const own = reductions.filter(([of]) => of === rank);
  const before = own.map(([, , , to]) => to).filter((to) => to <= moment);
  const from = Math.max(next > picture.firsts[rank] ? end[next - 1] : 0, ...before);
  const after = own.map(([, , from]) => from).filter((from) => from > moment);
  const to = Math.min(next < last ? start[next] : makespan, ...after);
  const facts = [["rank", rank], ["from", time(from, to - from)], ["to", time(to, to - from)], ["for", time(to - from)]];
  if (next < last) facts.push(["until", picture.textOf(next)], ...stood(picture, next));
  const wait = picture.waits.get(next);
  const rest = wait && next < last ? to - from - (wait.end - wait.start) : 0;
  if (rest > 1e-9 * whole) facts.push(["the runtime's own", time(rest)]);
  fillTooltip(node("b", "idle"), facts);
}

function describeHeld(picture, { rank, moment }) {
  fillTooltip(node("b", `rank ${rank}: ${drawing.held}`), [
    ["at", time(moment, view.length)],
    ["held", number(picture.heldAt(rank, moment))],
    ["peak", number(picture.panel.peaks[rank])],
  ]);
}

function placeTooltip(x, y) {
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  const left = x + 16 + width < window.innerWidth ? x + 16 : Math.max(4, x - 16 - width);
  const top = y + 14 + height < window.innerHeight ? y + 14 : Math.max(4, y - 14 - height);
  tooltip.style.transform = `translate(${left}px, ${top}px)`;
}

// --- hovering ------------------------------------------------------------------------------------

function hover(picture, x, y) {
  const found = picture.under(x, y);
  point(picture, found ? found.op : null);
  for (const each of pictures) {
    each.hair.hidden = x < LEFT || x > picture.right;
    each.hair.style.left = `${x}px`;
    each.hair.dataset.time = time(picture.moment(x), view.length);
  }
  if (!found) tooltip.hidden = true;
  else if (found.op !== null) describeOp(picture, found.op);
  else if (found.reduction) describeReduction(picture, found.reduction);
  else if (found.inStrip) describeHeld(picture, found);
  else describeIdle(picture, found);
  return found !== null;
}

function point(picture, op) {
  const microbatch = op === null ? null : picture.panel.microbatch[op];
  if (state.picture === picture && state.op === op && state.microbatch === microbatch) return;
  Object.assign(state, { picture, op, microbatch });
  redraw();
}

function leave() {
  point(null, null);
  tooltip.hidden = true;
  for (const picture of pictures) picture.hair.hidden = true;
}

// --- zooming and panning -------------------------------------------------------------------------

const pointers = new Map(); // those that are down

function listen(picture) {
  const { canvas } = picture;
  canvas.addEventListener("wheel", (event) => wheel(picture, event), { passive: false });
  canvas.addEventListener("dblclick", showWhole);
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.offsetX);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (pointers.has(event.pointerId)) drag(picture, event);
    else if (hover(picture, event.offsetX, event.offsetY)) placeTooltip(event.clientX, event.clientY);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, (event) => {
      pointers.delete(event.pointerId);
      canvas.classList.remove("panning");
      if (event.pointerType !== "mouse" && hover(picture, event.offsetX, event.offsetY)) {
        placeTooltip(event.clientX, event.clientY);
      }
    });
  }
  canvas.addEventListener("pointerleave", leave);
}

/** Zoom over the ops; elsewhere the page scrolls. */
function wheel(picture, event) {
  const x = event.offsetX;
  if (x < LEFT || x > picture.right) return;
  if (drawing.embedded && !event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  const lines = event.deltaMode ? 16 : 1;
  const sideways = event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX;
  if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
    view.pan((sideways * lines) / picture.pixels);
  } else {
    const pace = event.ctrlKey ? 0.01 : 0.0016; // a pinch on a touchpad comes as a wheel with ctrl
    view.zoom(Math.exp(event.deltaY * lines * pace), picture.moment(x));
  }
  if (hover(picture, x, event.offsetY)) placeTooltip(event.clientX, event.clientY);
  redraw();
}

/** One pointer pans; two keep the times under them while they move apart or together. */
function drag(picture, event) {
  const before = [...pointers.values()];
  pointers.set(event.pointerId, event.offsetX);
  const after = [...pointers.values()];
  if (before.length === 1) {
    view.pan((before[0] - after[0]) / picture.pixels);
  } else {
    const apart = ([one, other]) => Math.max(Math.abs(one - other), 8);
    const middle = ([one, other]) => (one + other) / 2;
    view.pan((middle(before) - middle(after)) / picture.pixels);
    view.zoom(apart(before) / apart(after), picture.moment(middle(after)));
  }
  picture.canvas.classList.add("panning");
  leave();
  redraw();
}

function showWhole() {
  view.show(0, whole);
  redraw();
}

function zoom(factor) {
  view.zoom(factor);
  redraw();
}

function pan(share) {
  view.pan(share * view.length);
  redraw();
}

// --- buttons and keys ----------------------------------------------------------------------------

function toggle(name) {
  const button = element(name);
  if (button.disabled) return;
  state[name] = !state[name];
  button.setAttribute("aria-pressed", String(state[name]));
  refit();
}

/** Show the op of that text in the middle, with its tooltip; false where there is none. */
function find(text) {
  const picture = pictures.find((each) => each.places.has(text));
  if (!picture) return false;
  const at = picture.places.get(text);
  const { start, end } = picture.panel;
  const half = Math.min(view.length, Math.max(16 * (end[at] - start[at]), view.least)) / 2;
  const middle = (start[at] + end[at]) / 2;
  view.show(middle - half, middle + half);
  point(picture, at);
  drawNow();
  describeOp(picture, at);
  picture.canvas.scrollIntoView({ block: "nearest" });
  const edge = picture.canvas.getBoundingClientRect();
  const box = picture.boxOf(at);
  placeTooltip(edge.left + box.x + box.width / 2, edge.top + box.y + box.height);
  return true;
}

const KEYS = {
  "+": () => zoom(1 / 1.5), "=": () => zoom(1 / 1.5), "-": () => zoom(1.5), "−": () => zoom(1.5),
  "0": showWhole, Home: showWhole, ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
  c: () => toggle("critical"), m: () => toggle("held"), Escape: leave,
};

document.addEventListener("keydown", (event) => {
  const action = KEYS[event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "INPUT") return;
  if (drawing.embedded && !event.target.closest(".panel, .toolbar")) return; // the rest of the page has keys too
  event.preventDefault();
  action();
});

element("in").addEventListener("click", () => zoom(1 / 1.5));
element("out").addEventListener("click", () => zoom(1.5));
element("whole").addEventListener("click", showWhole);
for (const name of ["critical", "held"]) element(name).addEventListener("click", () => toggle(name));
element("critical").disabled = !pictures.some((picture) => picture.criticals.size);
element("held").disabled = !pictures.some((picture) => picture.mostHeld);

const field = element("find");
field.addEventListener("input", () => field.removeAttribute("aria-invalid"));
field.addEventListener("change", () => {
  const text = field.value.trim().toUpperCase();
  if (!text) leave();
  else if (!find(text)) field.setAttribute("aria-invalid", "true");
});

function findFragment() {
  const text = decodeURIComponent(location.hash.slice(1));
  if (text && find(text)) field.value = text;
}

for (const picture of pictures) listen(picture);
new ResizeObserver(refit).observe(document.querySelector("main"));
for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", drawNow);
drawNow();
findFragment();
window.addEventListener("hashchange", findFragment);
