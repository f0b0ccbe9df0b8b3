// Shows the values under the pointer, read back from the curves themselves, and opens what is folded for printing.
"use strict";
for (const plot of document.querySelectorAll("figure.plot")) {
  const svg = plot.querySelector("svg"), out = plot.querySelector("output"), box = svg.viewBox.baseVal;
  const range = plot.dataset, [x0, x1, y0, y1] = [range.x0, range.x1, range.y0, range.y1].map(Number);
  const show = value => "percent" in range ? (100 * value).toPrecision(3) + " %" : String(Number(value.toPrecision(4)));
  const curves = [...svg.querySelectorAll("path[data-name]")].map(path => ({
    name: path.dataset.name,
    points: path.getAttribute("d").match(/\d+ \d+/g).map(pair => pair.split(" ").map(Number)),
  }));
  const cursor = document.createElementNS(svg.namespaceURI, "path");
  cursor.setAttribute("class", "cursor");
  svg.append(cursor);
  const look = event => {
    const place = svg.getBoundingClientRect();
    const at = Math.max(0, Math.min(box.width, (event.clientX - place.left) / place.width * box.width));
    cursor.setAttribute("d", `M${Math.round(at)} 0v${box.height}`);
    const values = curves.map(({name, points}) => {
      let low = 0, high = points.length - 1;
      while (high - low > 1) { const middle = (low + high) >> 1; if (points[middle][0] <= at) low = middle; else high = middle; }
      const [, y] = Math.abs(points[low][0] - at) <= Math.abs(points[high][0] - at) ? points[low] : points[high];
      return (curves.length > 1 ? name + " " : "") + show(y1 - y / box.height * (y1 - y0));
    });
    out.textContent = `${range.x} ${Math.round(x0 + at / box.width * (x1 - x0))}: ${values.join(", ")}`;
  };
  svg.addEventListener("pointermove", look);
  svg.addEventListener("pointerdown", look);
  svg.addEventListener("pointerleave", () => { cursor.removeAttribute("d"); out.textContent = ""; });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(each => each.open = true));
