// The inline trace view: a canvas, no dependency, no build step. view.py packs the data.
// Every name of the trace is drawn on the canvas or set as textContent: it is text, never html.
'use strict';

const LIGHT = { page: '#ffffff', ink: '#1b1f24', pale: '#57606a', band: '#eef1f5', line: '#d5dae0', grid: '#eceff2', field: '#ffffff', flow: '#3d444d', pick: '#000000', area: '#0072B2' };
const DARK = { page: '#111418', ink: '#e8ebee', pale: '#a2abb5', band: '#22272e', line: '#3a424b', grid: '#23282f', field: '#0c0e11', flow: '#c3cad2', pick: '#ffffff', area: '#56B4E9' };

const STYLE = `
  html, body { margin: 0; height: 100%; overflow: hidden; background: var(--page); color: var(--ink);
    font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
  body { display: flex; flex-direction: column; border: 1px solid var(--line); box-sizing: border-box; border-radius: 4px; }
  .bar { display: flex; gap: 6px; align-items: center; padding: 4px 8px; min-height: 24px; white-space: nowrap; overflow: hidden; }
  .bar b { overflow: hidden; text-overflow: ellipsis; min-width: 40px; }
  .bar .facts, .foot .hint { color: var(--pale); overflow: hidden; text-overflow: ellipsis; }
  .space { flex: 1; }
  .label { background: #D55E00; color: #000; border-radius: 3px; padding: 1px 6px; font-weight: 600; }
  .foot { border-top: 1px solid var(--line); padding: 3px 8px; }
  button, input { font: inherit; color: inherit; background: var(--field); border: 1px solid var(--line); border-radius: 3px; padding: 2px 7px; }
  button { cursor: pointer; } button:hover, button:focus-visible, input:focus { border-color: var(--area); outline: none; }
  input { width: 150px; min-width: 60px; }
  .found { color: var(--pale); min-width: 48px; }
  .lanes { flex: 1; min-height: 0; position: relative; overflow: hidden; border-top: 1px solid var(--line); outline: none; }
  .lanes.active { overflow-y: auto; }
  canvas { display: block; position: sticky; top: 0; touch-action: pan-y; }
  .tip { position: absolute; pointer-events: none; max-width: 420px; background: var(--page); color: var(--ink); border: 1px solid var(--line);
    border-radius: 4px; padding: 4px 8px; box-shadow: 0 2px 8px #0004; z-index: 2; white-space: pre-wrap; overflow-wrap: anywhere; }
  .tip .pale { color: var(--pale); }
  .details { height: 148px; overflow: auto; border-top: 1px solid var(--line); padding: 4px 8px; position: relative; flex: none; }
  .details h1 { font-size: 13px; margin: 2px 0 4px; overflow-wrap: anywhere; padding-right: 24px; }
  .details table { border-spacing: 0; } .details td { padding: 1px 16px 1px 0; vertical-align: top; white-space: pre-wrap; overflow-wrap: anywhere;
    font: 11.5px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
  .details td:first-child { color: var(--pale); min-width: 72px; max-width: 180px; }
  .close { position: absolute; right: 6px; top: 4px; border: 0; background: none; font-size: 14px; }
  .message { position: absolute; inset: auto 8px 36px auto; max-width: 480px; background: var(--page); border: 1px solid var(--area); border-radius: 4px; padding: 8px 28px 8px 10px; z-index: 3; line-height: 1.5; white-space: normal; }
  .message code { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, monospace; background: var(--band); padding: 0 3px; }
  .legend { display: flex; gap: 2px 10px; flex-wrap: wrap; padding: 0 8px; margin: 3px 0; height: 16px; line-height: 16px; flex: none; overflow: hidden; color: var(--pale); }
  .legend span { cursor: pointer; } .legend span:hover { color: var(--ink); }
  .legend i { display: inline-block; width: 10px; height: 10px; margin-right: 4px; border-radius: 2px; vertical-align: -1px; }
  [hidden] { display: none !important; }`;

const KEYS = [
  ['Ctrl (or ⌘) + wheel, + −', 'zoom'], ['drag, A D, ← →, Shift + wheel', 'move in time'], ['W S', 'zoom in, out'],
  ['Shift + drag', 'measure a stretch, then zoom to it'], ['click', 'arguments of a slice'], ['double click, F', 'zoom to a slice'],
  [', .', 'slice before, after'], ['/ then Enter', 'search, next hit'], ['0', 'whole trace'], ['Esc', 'close, let the wheel go'],
];

function view(data) {
  const began = performance.now();
  const { row: ROW, header: HEADER, counter: COUNTER, gap: GAP, axis: AXIS, names: NAMES } = data.sizes;
  const names = new Map(data.processes);
  const { tracks, slices, flows } = unpack(data);

  // ---- page -------------------------------------------------------------------------------
  const make = (tag, className, text, parent) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };
  const button = (text, hint, parent, act) => {
    const node = make('button', '', text, parent);
    node.title = hint; node.setAttribute('aria-label', hint); node.onclick = act;
    return node;
  };
  make('style', '', STYLE, document.head);
  const bar = make('div', 'bar', undefined, document.body);
  if (data.title) make('b', 'title', data.title, bar);
  make('span', 'facts', facts(), bar);
  if (data.label) {
    make('span', 'label', data.label, bar).title = 'The lengths were set, not measured: this is a schedule and no benchmark.';
  }
  make('span', 'space', undefined, bar);
  const search = make('input', '', undefined, bar);
  search.placeholder = 'search name, type, shape';
  search.setAttribute('aria-label', 'search slices');
  const found = make('span', 'found', '', bar);
  found.hidden = true;
  button('−', 'zoom out (S)', bar, () => zoom(1.5, middle()));
  button('+', 'zoom in (W)', bar, () => zoom(1 / 1.5, middle()));
  button('fit', 'the whole trace (0)', bar, () => fit());
  button('?', 'keys', bar, () => say(help()));

  const legend = make('div', 'legend', undefined, document.body);
  data.kinds.forEach(([name, colour], i) => {
    if (i >= 14) return;
    const chip = make('span', '', undefined, legend);
    make('i', '', undefined, chip).style.background = colour;
    chip.append(name);
    chip.title = 'show only these';
    chip.onclick = () => { const on = search.value === `type:${name}`; search.value = on ? '' : `type:${name}`; seek(); };
  });

  const lanes = make('div', 'lanes', undefined, document.body);
  lanes.tabIndex = 0;
  const canvas = make('canvas', '', undefined, lanes);
  canvas.setAttribute('role', 'img');
  canvas.setAttribute('aria-label', `${data.title || 'trace'}: ${facts()}`);
  const filler = make('div', '', undefined, lanes); // gives the lanes their full height to scroll
  const tip = make('div', 'tip', undefined, document.body);
  tip.hidden = true;
  const details = make('div', 'details', undefined, document.body);
  details.hidden = true;
  const foot = make('div', 'bar foot', undefined, document.body);
  button('Open in Perfetto', 'the full trace viewer, served by this Jupyter server', foot, openPerfetto).className = 'perfetto';
  button('Save as file', 'download trace.json, for Perfetto, chrome://tracing or vizviewer', foot, save);
  const reduced = data.below ? `${data.total.toLocaleString('en')} slices; those under ${length(data.below)} are drawn together. t.save("trace.json") keeps them all. ` : '';
  make('span', 'hint', `${reduced}Ctrl + wheel zooms · drag moves · click shows arguments`, foot);

  // ---- state ------------------------------------------------------------------------------
  const pen = canvas.getContext('2d', { alpha: false });
  const folded = new Set(); // pids
  const end = Math.max(data.duration, 1);
  let colours = LIGHT, from, to; // the stretch of time in sight, ns
  let width = 0, height = 0, total = 0; // of the canvas; of all lanes
  let picked = null, drag = null, hits = null, hit = -1, pending = 0, headers = [];
  const ink = data.kinds.map(([, colour]) => dark(colour) ? '#fff' : '#14171a');

  function facts() {
    const lanes = data.processes.length;
    const ranks = data.processes.every(([, name]) => /^rank\b/i.test(name)) ? 'rank' : 'process';
    const many = lanes === 1 ? ranks : ranks === 'rank' ? 'ranks' : 'processes';
    return `${lanes} ${many} · ${data.total.toLocaleString('en')} ${data.total === 1 ? 'slice' : 'slices'} · ${length(data.duration)}`;
  }

  function arrange() { // where each lane is, top to bottom
    let y = AXIS, pid;
    headers = [];
    for (const track of tracks) {
      if (track.pid !== pid) { pid = track.pid; headers.push({ pid, y }); y += HEADER; }
      track.shown = !folded.has(pid);
      track.y = y;
      track.height = track.series.length ? COUNTER : track.rows * track.px;
      if (track.shown) y += track.height + GAP;
    }
    total = y;
  }
  const fit = () => { from = -end * 0.01; to = end * 1.02; draw(); };
  const x = ns => NAMES + (ns - from) / (to - from) * (width - NAMES);
  const ns = px => from + (px - NAMES) / (width - NAMES) * (to - from);
  const middle = () => (NAMES + width) / 2;
  const draw = () => { pending = pending || requestAnimationFrame(paint); };

  // ---- drawing ----------------------------------------------------------------------------
  function paint() {
    pending = 0;
    const ratio = devicePixelRatio || 1, wide = lanes.clientWidth, high = lanes.clientHeight;
    if (!wide || !high) return;
    if (wide !== width || high !== height || canvas.width !== Math.round(wide * ratio)) {
      width = wide; height = high;
      canvas.width = Math.round(wide * ratio); canvas.height = Math.round(high * ratio);
      canvas.style.width = wide + 'px'; canvas.style.height = high + 'px';
    }
    filler.style.height = Math.max(0, total - high) + 'px';
    const top = lanes.scrollTop;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = getComputedStyle(document.body).font.replace('12px', '11px');
    pen.textBaseline = 'middle';
    pen.fillStyle = colours.page; pen.fillRect(0, 0, width, height);
    const marks = ticks();
    pen.fillStyle = colours.grid;
    for (const t of marks) pen.fillRect(Math.round(x(t)), AXIS, 1, height);
    for (const track of tracks) {
      const y = track.y - top;
      if (!track.shown || y > height || y + track.height < 0) continue;
      if (track.series.length) paintCounter(track, y); else paintSlices(track, y);
    }
    paintFlows(top);
    for (const { pid, y } of headers) {
      pen.fillStyle = colours.band; pen.fillRect(0, y - top, width, HEADER - 2);
      pen.fillStyle = colours.ink; pen.font = pen.font.replace('11px', 'bold 11px');
      pen.fillText(`${folded.has(pid) ? '▸' : '▾'} ${names.get(pid)}`, 6, y - top + HEADER / 2 - 1);
      pen.font = pen.font.replace('bold ', '');
    }
    pen.fillStyle = colours.page; pen.fillRect(0, 0, width, AXIS - 2);
    pen.fillStyle = colours.line; pen.fillRect(0, AXIS - 3, width, 1);
    pen.fillStyle = colours.pale;
    for (const t of marks) {
      if (x(t) < NAMES - 1) continue;
      pen.fillRect(Math.round(x(t)), AXIS - 8, 1, 6);
      const words = length(t, to - from);
      if (x(t) + 4 + pen.measureText(words).width < width) pen.fillText(words, x(t) + 4, AXIS / 2 - 2);
    }
    if (drag && drag.measure) {
      const a = Math.min(drag.x, drag.now), b = Math.max(drag.x, drag.now), time = length(ns(b) - ns(a));
      pen.globalAlpha = 0.2; pen.fillStyle = colours.area; pen.fillRect(a, AXIS, b - a, height); pen.globalAlpha = 1;
      pen.fillStyle = colours.page; pen.fillRect(a, 0, Math.max(b - a, 70), AXIS - 3);
      pen.fillStyle = colours.ink; pen.fillText(`↔ ${time}`, a + 4, AXIS / 2 - 2);
    }
  }

  function ticks() {
    const rough = (to - from) / Math.max(3, (width - NAMES) / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find(m => m * power >= rough), out = [];
    for (let t = Math.ceil(Math.max(from, 0) / step) * step; t <= Math.min(to, end * 1.02); t += step) out.push(t);
    return out;
  }

  function name(track, y) { // in the left column, over whatever was drawn below it
    pen.fillStyle = colours.page; pen.fillRect(0, y, NAMES - 2, track.height + GAP);
    pen.fillStyle = colours.pale;
    pen.fillText(cut(track.name.replace(/ \(\w+\)$/, track.series.length ? '' : '$&'), NAMES - 16), 10, y + Math.min(ROW, track.height) / 2 - 1);
  }

  function cut(text, room) {
    if (pen.measureText(text).width <= room) return text;
    let low = 0, high = text.length;
    while (low < high) {
      const mid = (low + high + 1) >> 1;
      if (pen.measureText(text.slice(0, mid) + '…').width <= room) low = mid; else high = mid - 1;
    }
    return low ? text.slice(0, low) + '…' : '';
  }

  function short(text, room) { // of layers.0.attn.wq the end says most: attn.wq, wq
    if (pen.measureText(text).width <= room) return text;
    const parts = text.replace(/ \(backward\)$/, '').split('.');
    if (parts.some(part => /\s/.test(part))) return cut(text, room); // no dotted name
    let end = parts[parts.length - 1];
    for (let i = 1; i < parts.length; i++) {
      if (/^\d/.test(parts[i])) continue; // a bare "12" says nothing
      end = parts.slice(i).join('.');
      if (pen.measureText(end).width <= room) return end;
    }
    return /^\d/.test(end) ? '' : cut(end, room);
  }

  function paintSlices(track, y) {
    const { px } = track;
    for (let row = 0; row < track.rows; row++) {
      const list = track.byRow[row], top = y + row * px;
      if (top > height || top + px < 0) continue;
      let last = -1; // the pixel drawn last: slices below a pixel share one
      for (let i = firstEnding(list, from); i < list.length; i++) {
        const s = list[i];
        if (s.ts > to) break;
        const a = Math.max(x(s.ts), NAMES - 2), b = Math.min(x(s.ts + s.dur), width + 2);
        const lit = !hits || hits.has(s);
        if (b - a < 1 && a < last + 0.5 && s !== picked && !(hits && lit)) continue;
        last = Math.max(b, a + 1);
        pen.globalAlpha = lit ? 1 : 0.16;
        pen.fillStyle = data.kinds[s.kind][1];
        if (s.dur === 0) { // an instant
          pen.beginPath(); pen.moveTo(a, top); pen.lineTo(a + 5, top + px - 3); pen.lineTo(a - 5, top + px - 3); pen.fill();
        } else {
          const w = Math.max(b - a - (b - a > 4 ? 0.75 : 0), 1);
          pen.fillRect(a, top, w, px - 2);
          if (s.cat === 'backward') { pen.fillStyle = '#0006'; pen.fillRect(a, top + px - 5, w, 3); }
        }
        if (b - a > 26 && px === ROW) {
          pen.fillStyle = ink[s.kind];
          pen.fillText(short(s.name, b - a - 8), a + 4, top + px / 2 - 0.5);
        }
        if (s === picked) {
          pen.globalAlpha = 1; pen.strokeStyle = colours.pick; pen.lineWidth = 2;
          pen.strokeRect(a + 0.5, top, Math.max(b - a - 1, 2), px - 2);
        }
      }
    }
    pen.globalAlpha = 1;
    name(track, y);
  }

  function paintCounter(track, y) {
    const floor = y + COUNTER - 3, tall = COUNTER - 8, { low, most } = track, scale = tall / (most - low || 1);
    for (const { ts, value } of track.series) {
      let i = Math.max(0, lower(ts, from) - 1), px = -1;
      pen.beginPath(); pen.moveTo(x(Math.max(ts[i], from)), floor);
      for (; i < ts.length && ts[i] <= to; i++) {
        const level = floor - (value[i] - low) * scale, after = i + 1 < ts.length ? ts[i + 1] : Math.max(end, ts[i]);
        pen.lineTo(Math.max(x(ts[i]), NAMES - 2), level); px = Math.min(x(after), width);
        pen.lineTo(px, level);
      }
      pen.lineTo(px, floor);
      pen.fillStyle = colours.area; pen.globalAlpha = 0.3; pen.fill();
      pen.globalAlpha = 1; pen.strokeStyle = colours.area; pen.lineWidth = 1.2; pen.stroke();
    }
    name(track, y);
    pen.fillStyle = colours.pale;
    pen.fillText(cut(low ? `${amount(low, '')}–${amount(most, track.name)}` : `max ${amount(most, track.name)}`, NAMES - 16), 10, y + 23);
  }

  function paintFlows(top) {
    const busy = flows.length > 400 && to - from > end / 3;
    const seen = flows.filter(f => f.t1 >= from && f.t0 <= to).length, crowd = Math.min(0.85, Math.max(0.25, 30 / seen));
    pen.save();
    pen.beginPath(); pen.rect(NAMES - 2, AXIS, width, height); pen.clip();
    for (const f of flows) {
      const on = picked && (f.a === picked || f.b === picked);
      if (busy && !on || !f.a.track.shown || !f.b.track.shown) continue;
      const x0 = x(f.t0), x1 = x(f.t1);
      if (Math.max(x0, x1) < NAMES || Math.min(x0, x1) > width) continue;
      const y0 = f.a.track.y + (f.a.row + 0.5) * f.a.track.px - top - 1, y1 = f.b.track.y + (f.b.row + 0.5) * f.b.track.px - top - 1;
      if (Math.max(y0, y1) < AXIS || Math.min(y0, y1) > height) continue;
      pen.strokeStyle = pen.fillStyle = on ? '#D55E00' : colours.flow;
      pen.lineWidth = on ? 2 : 1; pen.globalAlpha = on ? 1 : hits ? 0.2 : crowd;
      const bend = Math.min(60, Math.max(10, Math.abs(x1 - x0) / 2));
      pen.beginPath(); pen.moveTo(x0, y0); pen.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1 - 5, y1); pen.stroke();
      pen.beginPath(); pen.moveTo(x1, y1); pen.lineTo(x1 - 7, y1 - 3.5); pen.lineTo(x1 - 7, y1 + 3.5); pen.fill();
    }
    pen.restore();
  }

  // ---- finding ----------------------------------------------------------------------------
  function under(event) {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, y = event.clientY - box.top + lanes.scrollTop;
    if (px < NAMES - 2 || event.clientY - box.top < AXIS) return null;
    const time = ns(px), near = 3 * (to - from) / (width - NAMES);
    for (const track of tracks) {
      if (!track.shown || y < track.y || y >= track.y + track.height || track.series.length) continue;
      const list = track.byRow[Math.floor((y - track.y) / track.px)] || [];
      let best = null, distance = near;
      for (let i = firstEnding(list, time - near); i < list.length && list[i].ts <= time + near; i++) {
        const s = list[i], away = Math.max(s.ts - time, time - s.ts - s.dur, 0);
        if (away <= distance && !(away === distance && best)) { best = s; distance = away; }
      }
      return best;
    }
    return null;
  }

  function header(event) {
    const y = event.clientY - canvas.getBoundingClientRect().top;
    return y < AXIS ? null : headers.find(h => y + lanes.scrollTop >= h.y && y + lanes.scrollTop < h.y + HEADER - 2);
  }

  function seek() { // search: light what matches, count it
    const text = search.value.trim().toLowerCase();
    hits = null; hit = -1;
    if (text) {
      const type = text.startsWith('type:') && text.slice(5);
      const kind = type ? data.kinds.map(k => k[0].toLowerCase() === type) : null;
      const inText = data.texts.map(t => t.toLowerCase().includes(text)), inArgs = data.args.map(a => JSON.stringify(a).toLowerCase().includes(text));
      hits = new Set(slices.filter(s => kind ? kind[s.kind] : inText[s.text] || inArgs[s.at]));
    }
    found.hidden = !hits;
    found.textContent = hits ? `${hits.size} found` : '';
    draw();
  }

  function next(step) {
    if (!hits || !hits.size) return;
    const list = [...hits].sort((a, b) => a.ts - b.ts);
    hit = (hit + step + list.length) % list.length;
    found.textContent = `${hit + 1} of ${list.length}`;
    pick(list[hit], true);
  }

  // ---- moving -----------------------------------------------------------------------------
  function show(a, b) { // a stretch of time, no narrower than 20 ns and no wider than the trace allows
    const span = Math.min(Math.max(b - a, 20), end * 1.2), mid = (a + b) / 2;
    const centre = Math.min(Math.max(mid, -end * 0.05), end * 1.05);
    from = centre - span / 2; to = centre + span / 2;
    tip.hidden = true;
    draw();
  }
  const zoom = (factor, px) => { const c = ns(Math.max(px, NAMES)); show(c - (c - from) * factor, c + (to - c) * factor); };
  const move = share => { const d = (to - from) * share; show(from + d, to + d); };

  function reveal(s) {
    if (folded.delete(s.track.pid)) arrange();
    if (s.ts + s.dur < from || s.ts > to) { const half = (to - from) / 2; show(s.ts + s.dur / 2 - half, s.ts + s.dur / 2 + half); }
    const y = s.track.y + s.row * s.track.px;
    if (y < lanes.scrollTop + AXIS) lanes.scrollTop = y - AXIS - HEADER;
    if (y + ROW > lanes.scrollTop + lanes.clientHeight) lanes.scrollTop = y + 2 * ROW - lanes.clientHeight;
  }

  function pick(s, go) {
    picked = s;
    if (s) { tell(s); if (go) reveal(s); } else close();
    draw();
  }

  // ---- telling ----------------------------------------------------------------------------
  // The cell grows by what the details need, where the page lets us; else the lanes give way.
  let grown = 0;
  function grow(pixels) {
    try { frameElement.style.height = `${frameElement.clientHeight - grown + pixels}px`; grown = pixels; } catch { /* not ours to size */ }
  }
  function close() { if (!details.hidden) { details.hidden = true; grow(0); } }

  function tell(s) {
    details.textContent = '';
    make('h1', '', s.name, details);
    button('✕', 'close (Esc)', details, () => pick(null)).className = 'close';
    const table = make('table', '', undefined, details);
    const row = (key, value) => {
      const line = table.insertRow();
      line.insertCell().textContent = key;
      line.insertCell().textContent = typeof value === 'string' ? value : flat(value);
    };
    const alike = slices.filter(o => o.text === s.text);
    row('where', `${names.get(s.track.pid)} · ${s.track.name}`);
    row('time', `${length(s.dur)} from ${length(s.ts)}` + (s.own < s.dur ? ` · ${length(s.own)} outside nested slices` : ''));
    if (alike.length > 1) {
      const all = alike.map(o => o.dur);
      row('same name', `${alike.length} slices · ${length(Math.min(...all.slice(0, 1e5)))} to ${length(Math.max(...all.slice(0, 1e5)))} · ${length(all.reduce((a, b) => a + b, 0))} in all`);
    }
    for (const f of flows.slice(0, 1e4)) {
      if (f.a === s) row('sends to', `${names.get(f.b.track.pid)} · ${f.b.name}, there at ${length(f.t1)}`);
      if (f.b === s) row('received from', `${names.get(f.a.track.pid)} · ${f.a.name}, sent at ${length(f.t0)}`);
    }
    if (s.cat) row('category', s.cat);
    for (const [key, value] of Object.entries(data.args[s.at])) if (flat(value) !== '') row(key, value);
    if (details.hidden) { details.hidden = false; grow(details.offsetHeight); }
    details.scrollTop = 0;
  }

  function hover(event) {
    const s = drag ? null : under(event);
    const counter = !s && !drag && tracks.find(t => t.shown && t.series.length && inside(t, event));
    canvas.style.cursor = s || header(event) ? 'pointer' : 'default';
    tip.hidden = !s && !counter;
    if (tip.hidden) return;
    tip.textContent = '';
    if (s) {
      const args = data.args[s.at];
      make('div', '', s.name, tip);
      make('div', 'pale', [args.type, length(s.dur), s.track.name].filter(Boolean).join(' · '), tip);
      for (const key of ['inputs', 'outputs', 'shape', 'bytes', 'peer']) {
        if (args[key] !== undefined && args[key] !== '') make('div', 'pale', `${key} ${String(flat(args[key])).slice(0, 120)}`, tip);
      }
    } else {
      const time = ns(event.clientX - canvas.getBoundingClientRect().left);
      for (const { name, ts, value } of counter.series) {
        const i = lower(ts, time) - 1;
        if (i >= 0) make('div', '', `${name} ${amount(value[i], counter.name)}`, tip);
      }
    }
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${below ? event.clientY + 18 : Math.max(2, event.clientY - tip.offsetHeight - 10)}px`;
  }
  function inside(track, event) {
    const y = event.clientY - canvas.getBoundingClientRect().top + lanes.scrollTop;
    return y >= track.y && y < track.y + track.height && event.offsetX > NAMES;
  }

  function say(content) { // a note over the view, closed by a click on ✕ or Esc
    hush();
    const note = make('div', 'message', undefined, document.body);
    note.append(content);
    button('✕', 'close', note, hush).className = 'close';
  }
  const hush = () => document.querySelectorAll('.message').forEach(n => n.remove());
  function help() {
    const table = document.createElement('table');
    for (const [keys, what] of KEYS) { const r = table.insertRow(); r.insertCell().textContent = keys; r.insertCell().textContent = what; }
    return table;
  }

  // ---- mouse and keys ---------------------------------------------------------------------
  // The wheel belongs to the notebook: with Ctrl it zooms, sideways it moves in time, and lanes
  // that are taller than the view scroll only after a click in them.
  lanes.addEventListener('wheel', event => {
    if (event.ctrlKey || event.metaKey) {
      zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY)) * 0.003), event.clientX - canvas.getBoundingClientRect().left);
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      move((event.deltaX || event.deltaY) / width);
    } else return;
    event.preventDefault();
  }, { passive: false });
  const activate = on => lanes.classList.toggle('active', on && total > lanes.clientHeight);
  canvas.onpointerdown = event => {
    if (event.button) return;
    activate(true);
    lanes.focus({ preventScroll: true });
    const px = event.clientX - canvas.getBoundingClientRect().left;
    drag = { x: px, now: px, y: event.clientY, from, to, scroll: lanes.scrollTop, moved: false, measure: event.shiftKey };
    canvas.setPointerCapture(event.pointerId);
    tip.hidden = true;
  };
  canvas.onpointermove = event => {
    if (!drag) return hover(event);
    const px = event.clientX - canvas.getBoundingClientRect().left, dx = px - drag.x;
    drag.moved = drag.moved || Math.abs(dx) + Math.abs(event.clientY - drag.y) > 3;
    drag.now = Math.max(px, NAMES);
    if (drag.measure) return draw();
    if (!drag.moved) return;
    canvas.style.cursor = 'grabbing';
    const shift = dx / (width - NAMES) * (drag.to - drag.from);
    show(drag.from - shift, drag.to - shift);
    lanes.scrollTop = drag.scroll - (event.clientY - drag.y);
  };
  canvas.onpointerup = event => {
    const was = drag;
    drag = null;
    if (!was) return;
    if (was.measure && was.moved) return show(ns(Math.min(was.x, was.now)), ns(Math.max(was.x, was.now)));
    if (was.moved) return;
    const head = header(event);
    if (head) { if (!folded.delete(head.pid)) folded.add(head.pid); arrange(); return draw(); }
    pick(under(event));
  };
  canvas.onpointercancel = () => { drag = null; draw(); };
  canvas.onpointerleave = () => { tip.hidden = true; };
  canvas.ondblclick = event => { const s = under(event); if (s) frame(s); };
  const frame = s => show(s.ts - s.dur * 0.08 - 20, s.ts + s.dur * 1.08 + 20);
  lanes.onscroll = draw;

  search.oninput = seek;
  search.onkeydown = event => {
    if (event.key === 'Enter') next(event.shiftKey ? -1 : 1);
    else if (event.key === 'Escape') { search.value = ''; seek(); lanes.focus(); }
    event.stopPropagation();
  };
  document.addEventListener('keydown', event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const beside = step => {
      const list = picked ? picked.track.slices : slices;
      pick(list[Math.min(Math.max((picked ? list.indexOf(picked) : -1) + step, 0), list.length - 1)] || null, true);
    };
    const act = {
      w: () => zoom(0.8, middle()), s: () => zoom(1.25, middle()), '+': () => zoom(0.8, middle()), '-': () => zoom(1.25, middle()),
      a: () => move(-0.12), d: () => move(0.12), arrowleft: () => move(-0.12), arrowright: () => move(0.12),
      arrowup: () => { lanes.scrollTop -= 3 * ROW; }, arrowdown: () => { lanes.scrollTop += 3 * ROW; },
      0: () => fit(), f: () => picked && frame(picked), ',': () => beside(-1), '.': () => beside(1),
      '/': () => search.focus(), '?': () => say(help()),
      escape: () => { hush(); activate(false); if (drag) drag = null; pick(null); },
    }[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
  });

  // ---- the whole trace, elsewhere ---------------------------------------------------------
  const json = () => JSON.stringify({ traceEvents: chrome(data, tracks, flows), displayTimeUnit: 'ms' });
  function save() {
    const link = document.createElement('a');
    link.href = URL.createObjectURL(new Blob([json()], { type: 'application/json' }));
    link.download = 'trace.json';
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  async function openPerfetto() {
    const base = jupyter();
    // opened at once: a browser blocks windows that a click did not open
    const page = base ? `${base}shardbook/perfetto/index.html` : null;
    const there = page && await fetch(page, { method: 'HEAD' }).then(r => r.ok, () => false);
    const tab = there && open(`${page}#!/viewer`, '_blank');
    if (!tab) {
      const note = document.createElement('span');
      note.append(there ? 'The browser blocked the new window: allow it for this page. ' : 'No Jupyter server with shardbook is behind this page. ', 'Save the trace (the button beside this one, or ');
      make('code', '', 't.save("trace.json")', note);
      note.append(') and open it with ');
      make('code', '', 'vizviewer trace.json', note);
      note.append(', in chrome://tracing, or by dropping it on a Perfetto page.');
      return say(note);
    }
    const buffer = await new Blob([json()]).arrayBuffer();
    const origin = new URL(page).origin; // to our own server's page only
    const ping = setInterval(() => tab.closed ? clearInterval(ping) : tab.postMessage('PING', origin), 200);
    addEventListener('message', function pong(event) {
      if (event.source !== tab || event.data !== 'PONG') return;
      clearInterval(ping);
      removeEventListener('message', pong);
      tab.postMessage({ perfetto: { buffer, title: (data.title || 'trace') + (data.below ? ` (slices under ${length(data.below)} joined)` : ''), keepApiOpen: false } }, origin);
    });
  }

  // ---- theme ------------------------------------------------------------------------------
  function paintTheme() {
    colours = isDark() ? DARK : LIGHT;
    document.documentElement.style.colorScheme = colours === DARK ? 'dark' : 'light';
    for (const [key, value] of Object.entries(colours)) document.documentElement.style.setProperty(`--${key}`, value);
    draw();
  }
  try { // follow JupyterLab's or VS Code's theme when it changes
    new parent.MutationObserver(paintTheme).observe(parent.document.body, { attributes: true, attributeFilter: ['data-jp-theme-light', 'data-vscode-theme-kind', 'class'] });
  } catch { /* another origin: only the system's setting is known */ }
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', paintTheme);

  arrange(); paintTheme(); fit(); paint();
  new ResizeObserver(draw).observe(lanes);
  // for tests and for the curious: what is drawn, where, and how long it took
  window.trace = {
    data, tracks, slices, flows, pick, chrome: () => chrome(data, tracks, flows),
    range: () => [from, to], dark: () => colours === DARK,
    place: s => { const b = canvas.getBoundingClientRect(); return { x: b.left + x(s.ts + s.dur / 2), y: b.top + s.track.y + (s.row + 0.5) * s.track.px - lanes.scrollTop }; },
    mounted: performance.now(), took: performance.now() - began,
  };
}

// ---- data ---------------------------------------------------------------------------------
function unpack(data) { // columns to objects: slices in rows, each row sorted by time
  const slices = [];
  const tracks = data.tracks.map(track => {
    let ts = 0;
    const made = { ...track, byRow: Array.from({ length: track.rows }, () => []), most: 0, low: 0 };
    made.slices = track.dur.map((dur, i) => {
      ts += track.ts[i];
      const s = { track: made, ts, dur, own: dur + track.own[i], row: track.row[i], kind: track.kind[i], text: track.text[i], cat: data.texts[track.cat[i]], at: track.args[i], name: data.texts[track.text[i]] };
      made.byRow[s.row].push(s);
      return s;
    });
    for (const s of made.slices) slices.push(s);
    // a counter is drawn from 0, or from its lowest value where it hardly moves; its label says which
    const values = track.series.flatMap(series => series.value);
    made.most = values.reduce((a, b) => Math.max(a, b), 0);
    made.low = values.reduce((a, b) => Math.min(a, b), values.length ? Infinity : 0);
    if (made.low > 0 && made.low < made.most / 2 || made.low === made.most) made.low = 0;
    return made;
  });
  const flows = data.flows.map(([t, i, t0, u, j, t1]) => ({ a: tracks[t].slices[i], t0, b: tracks[u].slices[j], t1 }));
  return { tracks, slices, flows };
}

function chrome(data, tracks, flows) { // back to Chrome's format, for Perfetto
  const events = [], threads = new Map();
  const us = ns => { // gives back ns whether a reader rounds or cuts it
    let value = ns / 1000;
    while (Math.trunc(value * 1000) < ns) value += value * Number.EPSILON;
    return value;
  };
  const thread = track => { // Perfetto wants integers; a lane that does not nest gets one thread a row
    const key = JSON.stringify([track.pid, track.tid]);
    if (!threads.has(key)) threads.set(key, threads.size + 1);
    return threads.get(key);
  };
  const process = new Map(data.processes.map(([pid], i) => [pid, Number.isInteger(pid) ? pid : 1000000 + i]));
  data.processes.forEach(([pid, name], i) => {
    events.push({ ph: 'M', name: 'process_name', pid: process.get(pid), args: { name } });
    events.push({ ph: 'M', name: 'process_sort_index', pid: process.get(pid), args: { sort_index: i } });
  });
  const tids = new Map(); // of a slice
  tracks.forEach((track, index) => {
    const pid = process.get(track.pid);
    for (const { name, ts, value } of track.series) ts.forEach((t, i) => events.push({ ph: 'C', pid, name: track.name, ts: us(t), args: { [name]: value[i] } }));
    if (!track.slices.length) return;
    // Perfetto drops slices that overlap without nesting: those rows become threads of their own
    const nests = track.byRow.every((row, r) => r === 0 || row.every(s => within(track.byRow[r - 1], s)));
    for (let r = 0; r < (nests ? 1 : track.rows); r++) {
      const tid = thread({ pid: track.pid, tid: nests ? track.tid : `${track.tid}/${r}` });
      events.push({ ph: 'M', name: 'thread_name', pid, tid, args: { name: track.name } });
      events.push({ ph: 'M', name: 'thread_sort_index', pid, tid, args: { sort_index: index } });
      for (const s of nests ? track.slices : track.byRow[r]) {
        tids.set(s, tid);
        events.push({ ph: 'X', pid, tid, name: s.name, cat: s.cat || undefined, ts: us(s.ts), dur: us(s.dur), args: data.args[s.at] });
      }
    }
  });
  flows.forEach((f, id) => {
    if (f.a.dur < 2 || f.b.dur < 2) return; // an arrow's ends lie strictly inside their slices
    const end = (ph, s, t) => events.push({ ph, id: id + 1, name: 'flow', cat: 'flow', bp: 'e', pid: process.get(s.track.pid), tid: tids.get(s), ts: us(Math.min(Math.max(t, s.ts + 1), s.ts + s.dur - 1)) });
    end('s', f.a, f.t0); end('f', f.b, f.t1);
  });
  return events;
}

function within(row, s) { // is s inside one slice of the row above it?
  const o = row[firstEnding(row, s.ts)];
  return !!o && o.ts <= s.ts && o.ts + o.dur >= s.ts + s.dur;
}

function firstEnding(list, time) { // the first slice of a row that ends at or after this time
  let low = 0, high = list.length;
  while (low < high) { const mid = (low + high) >> 1; if (list[mid].ts + list[mid].dur < time) low = mid + 1; else high = mid; }
  return low;
}

function lower(sorted, value) { // how many are at or below value
  let low = 0, high = sorted.length;
  while (low < high) { const mid = (low + high) >> 1; if (sorted[mid] <= value) low = mid + 1; else high = mid; }
  return low;
}

// ---- words --------------------------------------------------------------------------------
function length(ns, span) { // a time; with a span, as exact as an axis of that span needs
  const size = Math.abs(span ?? ns);
  const [unit, name] = size >= 1e9 ? [1e9, 's'] : size >= 1e6 ? [1e6, 'ms'] : size >= 1e3 ? [1e3, 'µs'] : [1, 'ns'];
  if (span !== undefined) return `${+(ns / unit).toFixed(Math.max(0, 2 - Math.floor(Math.log10(span / unit))))} ${name}`;
  return `${+(ns / unit).toPrecision(4)} ${name}`;
}

function amount(value, name) { // bytes where the counter's name says so
  const unit = /\((\w+)\)$/.exec(name); // "memory (MB)"
  if (unit) return `${+value.toPrecision(4)} ${unit[1]}`;
  if (!/mem|byte|alloc/i.test(name)) return `${+value.toPrecision(4)}`;
  const power = Math.min(3, Math.max(0, Math.floor(Math.log2(Math.max(value, 1)) / 10)));
  return `${+(value / 1024 ** power).toPrecision(3)} ${['B', 'KiB', 'MiB', 'GiB'][power]}`;
}

function flat(value) { // args as text: a short list on one line, a dict a line a key
  if (value === null || typeof value !== 'object') return String(value);
  if (Array.isArray(value)) return value.map(flat).join(', ');
  return Object.entries(value).map(([k, v]) => `${k}: ${flat(v)}`).join('\n');
}

function dark(colour) { // does white read better on it? (WCAG 2 relative luminance)
  const [r, g, b] = [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16) / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.179;
}

// ---- surroundings -------------------------------------------------------------------------
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

function jupyter() { // the base URL of the Jupyter server whose page this is, if it is one
  try {
    const config = JSON.parse(parent.document.getElementById('jupyter-config-data').textContent);
    return new URL(config.baseUrl || '/', parent.location.href).href.replace(/\/?$/, '/');
  } catch { return null; }
}
