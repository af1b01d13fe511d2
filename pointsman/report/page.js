// Reading values off figures, and hiding lines of them; see page.py. Without it the page is complete, too.
const values = document.getElementById("values");
const number = value => Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });

function axis(text) {
  const [scale, low, high, unit] = text.split("|");
  const at = share => Number(low) + share * (Number(high) - Number(low));
  return share => number(scale === "log" ? 10 ** at(share) : at(share)) + unit;
}

function points(line) {
  line.points ??= line.getAttribute("d").slice(1).split("L").map(pair => pair.split(" ").map(Number));
  return line.points;
}

function show(plot, event) {
  const box = plot.getBoundingClientRect();
  const width = plot.width.baseVal.value, height = plot.height.baseVal.value;
  const x = (event.clientX - box.left) / box.width * width;
  const inReach = [...plot.querySelectorAll(".line:not(.off)")].flatMap(line => {
    const near = points(line).reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    return Math.abs(near[0] - x) < width / 20 ? [[line.dataset.series, near]] : [];
  });
  const readX = axis(plot.dataset.x), readY = axis(plot.dataset.y);
  const rows = inReach.sort((a, b) => a[1][1] - b[1][1]).map(([name, near]) => `${name}  ${readY(1 - near[1] / height)}`);
  if (!rows.length) return hide();
  values.textContent = [readX(x / width), ...rows].join("\n");
  values.style.display = "block";
  values.style.left = `${Math.min(event.clientX + 14, innerWidth - values.offsetWidth - 8)}px`;
  values.style.top = `${Math.min(event.clientY + 14, innerHeight - values.offsetHeight - 8)}px`;
}

const hide = () => { values.style.display = "none"; };
for (const plot of document.querySelectorAll(".plot")) {
  if (!plot.querySelector(".line")) continue;
  plot.addEventListener("pointermove", event => show(plot, event));
  plot.addEventListener("pointerleave", hide);
}

// A key hides its line in all figures of the section.
function toggle(key) {
  const isOff = !key.classList.contains("off");
  const same = `[data-series="${CSS.escape(key.dataset.series)}"]`;
  key.closest("section").querySelectorAll(same).forEach(part => part.classList.toggle("off", isOff));
}
for (const key of document.querySelectorAll(".key")) key.addEventListener("click", () => toggle(key));

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(part => { part.open = true; }));
