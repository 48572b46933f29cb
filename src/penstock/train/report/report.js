"use strict";
// The values of a chart under the pointer, read back from its lines. The page is whole without it.
{
  const shown = document.getElementById("value");
  const written = (value) => (Math.abs(value) >= 1e5 ? Math.round(value).toLocaleString("en") : value.toPrecision(4));

  /** Points [x, y] of a path in the square of 1000 by 1000. */
  const pointsOf = (path) => [...path.getAttribute("d").matchAll(/([-\d.]+) ([-\d.]+)/g)].map((found) => [+found[1], +found[2]]);

  for (const frame of document.querySelectorAll(".frame")) {
    const [left, right] = frame.dataset.x.split(" ").map(Number);
    const [low, high] = frame.dataset.y.split(" ").map(Number);
    const lines = [...frame.querySelectorAll(".line")].map((path) => [path.dataset.label, pointsOf(path)]);
    const cursor = document.createElement("div");
    cursor.className = "cursor";
    cursor.hidden = true;
    frame.append(cursor);

    const valueAt = (y) => {
      const place = high - (y / 1000) * (high - low);
      return frame.dataset.log === "1" ? 10 ** place : place;
    };
    const stepAt = (x) => Math.round(left + (x / 1000) * (right - left));

    const leave = () => {
      cursor.hidden = shown.hidden = true;
    };
    frame.addEventListener("pointermove", (event) => {
      const box = frame.getBoundingClientRect();
      const x = (1000 * (event.clientX - box.left)) / box.width;
      const near = lines.filter(([, points]) => points.length).map(([label, points]) => {
        const [at, y] = points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best));
        return { label, at, y };
      });
      if (!near.length) return;
      const { at } = near.reduce((best, each) => (Math.abs(each.at - x) < Math.abs(best.at - x) ? each : best));
      const values = near.map(({ label, at: own, y }) => {
        const elsewhere = Math.abs(own - at) > 0.5 ? `, step ${stepAt(own).toLocaleString("en")}` : "";
        return `${label} ${written(valueAt(y))}${elsewhere}`;
      });
      shown.textContent = [`step ${stepAt(at).toLocaleString("en")}`, ...values].join("\n");
      cursor.hidden = shown.hidden = false;
      cursor.style.left = `${at / 10}%`;
      const { width, height } = shown.getBoundingClientRect();
      const place = event.clientX + 16 + width < innerWidth ? event.clientX + 16 : Math.max(4, event.clientX - 16 - width);
      shown.style.transform = `translate(${place}px, ${Math.max(4, event.clientY - height - 10)}px)`;
    });
    frame.addEventListener("pointerleave", leave);
    frame.addEventListener("pointercancel", leave);
  }
}
