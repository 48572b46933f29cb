"use strict";
// The drawing's numbers, how they are written, and the stretch of time in view.

const drawing = JSON.parse(document.getElementById("drawing").textContent);
const whole = drawing.makespan || 1;

function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

function withoutZeros(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** As many decimals as show `value` with four digits. */
function decimalsOf(value) {
  return value ? clamp(3 - Math.floor(Math.log10(Math.abs(value))), 0, 12) : 0;
}

function number(value, decimals = decimalsOf(value)) {
  return withoutZeros(value.toFixed(decimals));
}

/** A time with its unit; `fine` is a length that it must tell apart. */
function time(value, fine = value) {
  const { size, name } = drawing.unit;
  return `${number(value / size, decimalsOf(fine / size))} ${name}`.trim();
}

function percent(share, decimals = 1) {
  return `${(100 * share).toFixed(decimals)}%`;
}

/** The smallest of 1, 2 and 5 times a power of ten that is not below `least`. */
function nice(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= least * (1 - 1e-9));
}

/** The first place from `low` to `high` where `reached` holds; it holds at all later ones. */
function firstPlace(low, high, reached) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (reached(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** What all panels show, in the drawing's time: never beyond the step, and never less than an op. */
class View {
  from = 0;
  to = whole;

  constructor(shortest) {
    this.least = Math.min(whole, Math.max(shortest, whole * 1e-9));
  }

  get length() {
    return this.to - this.from;
  }

  get isWhole() {
    return this.length >= whole * (1 - 1e-9);
  }

  show(from, to) {
    const length = clamp(to - from, this.least, whole);
    this.from = clamp((from + to - length) / 2, 0, whole - length);
    this.to = this.from + length;
  }

  /** Show `factor` times as much; what is at time `about` stays where it is. */
  zoom(factor, about = (this.from + this.to) / 2) {
    const length = clamp(this.length * factor, this.least, whole);
    const from = about - ((about - this.from) * length) / this.length;
    this.from = clamp(from, 0, whole - length);
    this.to = this.from + length;
  }

  pan(by) {
    this.show(this.from + by, this.to + by);
  }
}
