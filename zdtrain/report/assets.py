"""Style sheet and script of the page."""

STYLE = """:root { color-scheme: light dark; --ink: #1c2430; --soft: #667085; --rule: #e4e7ec; --paper: #fff;
  --card: #f8f9fb;
  --run0: #2563eb; --run1: #d9480f; --run2: #2b8a3e; --run3: #9c36b5; --run4: #0c8599; --run5: #a67c00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --rule: #303846; --paper: #12161d;
  --card: #1a2029; --run0: #6ea8fe; --run1: #ff922b; --run2: #69db7c; --run3: #da77f2; --run4: #3bc9db;
  --run5: #ffd43b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 32px 24px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0 0 8px; } h2, summary { font-size: 17px; font-weight: 600; margin: 36px 0 12px; }
.legend, .events { list-style: none; margin: 0; padding: 0; } .legend { display: flex; flex-wrap: wrap;
  gap: 4px 20px; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px;
  background: var(--c, var(--run0)); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: 18px; }
figure { margin: 0; padding: 14px 14px 8px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 10px; }
figcaption { font-weight: 600; margin-bottom: 6px; overflow-wrap: anywhere; }
.chart { width: 100%; height: auto; display: block; } .key { width: 24px; height: 6px; margin: 0 5px 2px 2px; }
.key line { stroke: var(--ink); stroke-width: 1.6; } figure p { margin: 0; font-size: 13px; color: #e03131; }
.missing { stroke: #e03131; stroke-width: 1.5; } output { display: block; min-height: 21px; font-size: 13px;
  color: var(--soft); }
.grid { stroke: var(--rule); } .tick { fill: var(--soft); font-size: 12px; } .cursor { stroke: var(--soft); }
.run0 { --c: var(--run0); } .run1 { --c: var(--run1); } .run2 { --c: var(--run2); }
.run3 { --c: var(--run3); } .run4 { --c: var(--run4); } .run5 { --c: var(--run5); }
.curve, .mean { fill: none; stroke: var(--c, var(--run0)); stroke-width: 1.8; stroke-linejoin: round; }
.mean { stroke-width: 2.4; } .faint { opacity: .4; stroke-width: 1; } .band { fill: var(--c, var(--run0));
  opacity: .13; }
.dot { fill: var(--c, var(--run0)); } .marker { stroke: var(--c, var(--run0)); stroke-dasharray: 2 3; }
.marker[data-kind="exception"] { stroke: #e03131; stroke-width: 2; stroke-dasharray: none; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 20px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
tbody th { font-weight: 400; color: var(--soft); min-width: 14ch; max-width: 40ch; overflow-wrap: anywhere; }
td, thead th { min-width: 19ch; max-width: 60ch; overflow-wrap: break-word; }
"""

SCRIPT = """// Under the pointer: the value of every curve at the nearest step.
for (const figure of document.querySelectorAll("figure")) {
  const svg = figure.querySelector(".chart");
  const cursor = svg.querySelector(".cursor");
  const out = figure.querySelector("output");
  const lines = JSON.parse(figure.querySelector("script").textContent);
  if (!lines.length) continue;  // nothing but values that are not finite
  const [low, high] = [Number(svg.dataset.low), Number(svg.dataset.high)];
  const [left, right, width] = [64, 548, 560];
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const x = Math.min(Math.max((event.clientX - box.left) / box.width * width, left), right);
    const at = low + (x - left) / (right - left) * (high - low);
    const distance = (line, i) => Math.abs(line.steps[i] - at);
    const near = line => line.steps.reduce((best, _, i) => distance(line, i) < distance(line, best) ? i : best, 0);
    const values = lines.map(line => `${line.name} ${line.values[near(line)].toPrecision(5)}`);
    out.textContent = `step ${Math.round(at)}: ${values.join(", ")}`;
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x);
    cursor.setAttribute("visibility", "visible");
  });
  svg.addEventListener("pointerleave", () => {
    out.textContent = "";
    cursor.setAttribute("visibility", "hidden");
  });
}
"""
