// Draws the figures of report pages; see page.py.
const figures = JSON.parse(document.getElementById("figures").textContent);
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const hidden = box => new Set([...box.closest("section").querySelectorAll('[aria-pressed="false"]')]
  .map(button => button.dataset.policy));

function draw(box) {
  const { data, layout } = structuredClone(figures[box.dataset.figure]);
  const off = hidden(box);
  for (const trace of data) {
    if (off.has(trace.name)) trace.visible = false;
    if (trace.type === "bar") {
      trace.error_x.color = colour("--ink");
      const keep = trace.y.map(name => !off.has(name));
      const kept = list => list.filter((_, i) => keep[i]);
      for (const key of ["x", "y", "customdata"]) trace[key] = kept(trace[key]);
      trace.marker.color = kept(trace.marker.color);
      for (const key of ["array", "arrayminus"]) trace.error_x[key] = kept(trace.error_x[key]);
    }
  }
  layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
  layout.font = { color: colour("--ink"), family: "system-ui, sans-serif", size: 12 };
  for (const axis of [layout.xaxis, layout.yaxis]) {
    axis.gridcolor = colour("--grid");
    axis.linecolor = colour("--line");
    axis.zeroline = false;
    axis.fixedrange = matchMedia("(pointer: coarse)").matches;
  }
  Plotly.react(box, data, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  box.dataset.drawn = "yes";
}

const watcher = new IntersectionObserver(entries => {
  for (const entry of entries) if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target); }
}, { rootMargin: "400px" });
for (const box of document.querySelectorAll(".figure")) watcher.observe(box);

const redraw = root => root.querySelectorAll(".figure[data-drawn]").forEach(draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw(document));
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
    redraw(button.closest("section"));
  });
}
