// The inline trace view: a canvas, no dependency, no build step. view.py packs the data, and puts
// these files one behind the other into one function view(data): they share what is declared here.
// Every name of the trace is drawn on the canvas or set as textContent: it is text, never html.

const began = performance.now();
const { row: ROW, header: HEADER, counter: COUNTER, gap: GAP, axis: AXIS, names: NAMES } = data.sizes;
const nameOf = new Map(data.processes);
const { tracks, slices, flows } = unpack(data);
const end = Math.max(data.duration, 1);
const folded = new Set(); // pids and tracks that are drawn as one row
if (data.shut) for (const pid of data.shut) folded.add(data.processes[pid][0]);
for (const track of tracks) if (track.fold) folded.add(track);
const ink = data.kinds.map(([, colour]) => dark(colour) ? '#fff' : '#14171a');
const tags = new Map(); // the names of ranks and lanes
let colours = LIGHT, [from, to] = data.window; // the stretch of time in sight, ns
let width = 0, height = 0, total = 0; // of the canvas; of all lanes
let picked = null, range = null, drag = null, hits = null, hit = -1, only = null, memory = false;
let pending = 0, heads = [], chips = [], active = false, seen = null;
const HINT = 'click: what a slice is, then the wheel zooms · drag: sums · Ctrl + wheel zooms';

function make(tag, className, text, parent) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
function button(text, hint, parent, act) {
  const node = make('button', '', text, parent);
  node.title = hint; node.setAttribute('aria-label', hint); node.onclick = act;
  return node;
}

make('style', '', STYLE, document.head);
const drawn = data.figure ? drawFigure() : null;
const bar = make('div', 'bar', undefined, document.body);
if (data.title) make('b', 'title', data.title, bar);
make('span', 'facts', facts(), bar);
if (data.label) {
  make('span', 'label', data.label, bar).title = 'The lengths were set, not measured: this is a schedule and no benchmark.';
}
make('span', 'space', undefined, bar);
const search = make('input', '', undefined, bar);
search.placeholder = 'search';
search.title = 'name, type, shape, file: / goes here, Enter to the next';
search.setAttribute('aria-label', 'search slices by name, type, shape');
const found = make('span', 'found', '', bar);
found.hidden = true;
found.setAttribute('role', 'status');
button('−', 'zoom out (S)', bar, () => zoom(1.5, middle()));
button('+', 'zoom in (W)', bar, () => zoom(1 / 1.5, middle()));
button('fit', 'the whole trace (0)', bar, () => fit());
if (tracks.some(track => track.memory)) {
  const toggle = button('memory', 'lanes of the memory in use', bar, () => {
    memory = !memory;
    toggle.setAttribute('aria-pressed', memory);
    if (memory) for (const track of tracks) if (track.memory) folded.delete(track.pid);
    arrange(); resize(); draw();
  });
  toggle.setAttribute('aria-pressed', 'false');
}
button('?', 'keys', bar, () => say(help()));

const legend = make('div', 'legend', undefined, document.body);
legend.setAttribute('role', 'group');
legend.setAttribute('aria-label', 'kinds of slices');
const more = make('button', 'more', '', legend);
let unrolled = false;
makeLegend();

const lanes = make('div', 'lanes', undefined, document.body);
lanes.tabIndex = 0;
lanes.setAttribute('role', 'group');
lanes.setAttribute('aria-label', 'lanes of the trace: . and , go from slice to slice, ? lists the keys');
const axis = make('canvas', 'axis', undefined, lanes);
const canvas = make('canvas', '', undefined, lanes);
canvas.setAttribute('role', 'img');
canvas.setAttribute('aria-label', `${data.title || 'trace'}: ${facts()}`);
const pen = canvas.getContext('2d', { alpha: false }), ruler = axis.getContext('2d', { alpha: false });
const filler = make('div', '', undefined, lanes); // gives the lanes their full height to scroll
const tip = make('div', 'tip', undefined, document.body);
tip.hidden = true;
const details = make('div', 'details', undefined, document.body);
details.hidden = true;
details.setAttribute('role', 'status');
const foot = make('div', 'bar foot', undefined, document.body);
button('Open in Perfetto', 'the full trace viewer, served by this Jupyter server', foot, openPerfetto).className = 'perfetto';
button('Save as file', 'download trace.json, for Perfetto, chrome://tracing or vizviewer', foot, save);
const reduced = data.below ? `${data.total.toLocaleString('en')} slices are too many bytes for a notebook: those under ${length(data.below)} are joined here, in search and in the saved file; t.save("trace.json") keeps them all. ` : '';
const before = data.window[0] > 0 ? `The view opens at the step; what was set up before it is ${length(data.window[0])} to the left (fit shows it). ` : '';
const hint = make('span', 'hint', HINT, foot);
if (reduced || before) make('div', 'hint', reduced + before, foot).style.flexBasis = '100%';

function facts() {
  const count = data.processes.length;
  const ranks = data.processes.every(([, name]) => /^rank\b/i.test(name));
  return `${ranks ? plural(count, 'rank') : plural(count, 'process', 'processes')} · ${plural(data.total, 'slice')} · ${length(data.duration)}`;
}

function makeLegend() { // a chip a colour; kinds that share the last one have one chip
  const byColour = new Map();
  data.kinds.forEach(([name, colour], i) => {
    const shared = colour === data.other;
    const entry = byColour.get(shared ? colour : i) || { name, colour, kinds: new Set() };
    entry.kinds.add(i);
    if (shared && entry.kinds.size > 1) entry.name = `${entry.kinds.size} other kinds`;
    byColour.set(shared ? colour : i, entry);
  });
  for (const { name, colour, kinds } of byColour.values()) {
    const chip = make('button', 'chip', undefined, legend);
    make('i', '', undefined, chip).style.background = colour;
    chip.append(name.length > 40 ? name.slice(0, 39) + '…' : name || 'no name');
    chip.title = `show only ${kinds.size > 1 ? [...kinds].map(i => data.kinds[i][0]).join(', ').slice(0, 500) : 'these'}`;
    chip.kinds = kinds;
    chip.setAttribute('aria-pressed', 'false');
    chip.onclick = () => { only = only === kinds ? null : kinds; seek(); };
    chips.push(chip);
  }
  legend.append(more);
  more.onclick = () => { unrolled = !unrolled; fitLegend(); resize(); };
}
function fitLegend() { // two lines, and a button for the rest
  for (const chip of chips) chip.hidden = false;
  more.hidden = true;
  if (legend.offsetHeight < 48) return;
  more.hidden = false;
  more.textContent = 'fewer';
  more.setAttribute('aria-expanded', unrolled);
  for (let i = chips.length - 1, out = 1; !unrolled && i > 0 && legend.offsetHeight >= 48; i--, out++) {
    chips[i].hidden = true;
    more.textContent = `${out} more`;
  }
}

function paintTheme() {
  colours = isDark() ? DARK : LIGHT;
  document.documentElement.style.colorScheme = colours === DARK ? 'dark' : 'light';
  for (const [key, value] of Object.entries(colours)) document.documentElement.style.setProperty(`--${key}`, value);
  draw();
}
function isDark() {
  try {
    const body = parent.document.body;
    if (body.dataset.jpThemeLight) return body.dataset.jpThemeLight === 'false';
    if (body.dataset.vscodeThemeKind) return /dark|high-contrast$/.test(body.dataset.vscodeThemeKind);
    const rgb = (parent.getComputedStyle(body).backgroundColor.match(/[\d.]+/g) || []).map(Number);
    if (rgb.length >= 3 && rgb[3] !== 0) return rgb[0] * 0.299 + rgb[1] * 0.587 + rgb[2] * 0.114 < 128;
  } catch { /* another origin */ }
  return matchMedia('(prefers-color-scheme: dark)').matches;
}
try { // follow JupyterLab's or VS Code's theme, and the size of the window, when they change
  new parent.MutationObserver(paintTheme).observe(parent.document.body, { attributes: true, attributeFilter: ['data-jp-theme-light', 'data-vscode-theme-kind', 'class'] });
  const gone = new AbortController();
  parent.addEventListener('resize', () => resize(), { signal: gone.signal });
  addEventListener('pagehide', () => gone.abort());
} catch { /* another origin: only the system's setting is known */ }
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', paintTheme);

arrange(); listen(); paintTheme(); fitLegend(); resize(); paint(); watch();
let wide = 0;
new ResizeObserver(() => {
  if (wide !== lanes.clientWidth) { wide = lanes.clientWidth; fitLegend(); resize(); }
  draw(); dock();
}).observe(lanes);
// for tests and for the curious: what is drawn, where, and how long it took
window.trace = {
  data, tracks, slices, flows, pick, chrome, sums, folded, range: () => [from, to], dark: () => colours === DARK,
  selected: () => range, active: () => active, hits: () => hits, total: () => total,
  place: s => { const b = canvas.getBoundingClientRect(); return { x: b.left + x(s.ts + (s.end - s.ts) / 2), y: b.top + middleOf(s) - lanes.scrollTop }; },
  mounted: performance.now(), took: performance.now() - began,
};
