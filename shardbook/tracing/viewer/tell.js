// Telling: the panel of a slice or of a stretch, always in sight; the words at the mouse; notes.

function pick(s, go) {
  picked = s;
  if (s) { tell(s); if (go) reveal(s); } else if (!range) close();
  lightBoxes();
  draw();
}

function open() { // an empty panel, to be filled and then shown with settle()
  details.textContent = '';
  details.hidden = false;
  details.scrollTop = 0;
}
function settle() {
  const shut = make('button', 'close', '✕', details);
  shut.setAttribute('aria-label', 'close'); shut.title = 'close (Esc)';
  shut.onclick = () => { picked = range = null; close(); lightBoxes(); draw(); };
  resize();
  watch();
}
function close() { if (!details.hidden) { details.hidden = true; details.textContent = ''; resize(); } }

function tell(s) {
  open();
  make('h1', '', s.name.slice(0, 2000), details);
  const table = make('table', '', undefined, details);
  const row = (key, value) => {
    const line = table.insertRow();
    line.insertCell().textContent = key;
    line.insertCell().textContent = typeof value === 'string' ? value : flat(value);
  };
  const alike = slices.filter(o => o.text === s.text);
  row('where', `${nameOf.get(s.track.pid)} · ${s.track.name}`);
  row('time', `${length(s.dur)} from ${length(s.ts)}` + (s.mark ? ': from the call until it was waited for' : s.own < s.dur ? ` · ${length(s.own)} outside nested slices` : ''));
  if (alike.length > 1) {
    let least = Infinity, most = 0, sum = 0;
    for (const { dur } of alike) { least = Math.min(least, dur); most = Math.max(most, dur); sum += dur; }
    row('same name', `${alike.length} slices · ${length(least)} to ${length(most)} · ${length(sum)} in all`);
  }
  for (const f of flows.slice(0, 1e4)) {
    if (f.a === s) row('sends to', `${nameOf.get(f.b.track.pid)} · ${f.b.name}, there at ${length(f.t1)}`);
    if (f.b === s) row('received from', `${nameOf.get(f.a.track.pid)} · ${f.a.name}, sent at ${length(f.t0)}`);
  }
  if (s.cat) row('category', s.cat);
  for (const [key, value] of Object.entries(data.args[s.at])) {
    if (flat(value) !== '') row(key, key === 'bytes' && value > 999 ? `${value.toLocaleString('en')} (${size(value)})` : value);
  }
  settle();
}

function tellRange() { // count, total, mean and most of each name in the stretch
  open();
  const list = sums(range), count = list.reduce((n, sum) => n + sum.count, 0);
  make('h1', '', `${length(range.to - range.from)} from ${length(range.from)}: ${plural(count, 'slice')} in ${plural(range.inside.length, 'lane')}`, details);
  if (count) make('p', '', 'Whole lengths of all slices that touch the stretch; nested slices count beside those that hold them. F zooms here, Esc clears.', details);
  else make('p', '', 'No slice lies here.', details);
  const table = make('table', 'sums', undefined, details), bytes = list.some(sum => sum.bytes);
  const row = (cells, tag) => { const line = table.insertRow(); for (const cell of cells) make(tag, '', cell, line); };
  if (count) row(['name', 'count', 'total', 'mean', 'maximum', ...bytes ? ['bytes'] : []], 'th');
  for (const { name, count, total, most, bytes: sent } of list.slice(0, 200)) {
    row([name.slice(0, 300), count.toLocaleString('en'), length(total), length(total / count), length(most), ...bytes ? [sent ? size(sent) : ''] : []], 'td');
  }
  if (list.length > 200) make('p', '', `and ${list.length - 200} names more, with less time`, details);
  settle();
}

// ---- in sight ---------------------------------------------------------------------------
// The cell is as high as lanes and panel need, but never higher than the notebook shows, so that
// all of it can be in sight at once; what does not fit scrolls inside.
function resize() {
  if (data.height) return;
  try {
    const bars = [bar, legend, foot, ...drawn ? [drawn] : []].reduce((sum, node) => sum + node.offsetHeight, 8);
    const wanted = Math.max(bars + total + 6, data.sizes.lowest) + (details.hidden ? 0 : details.offsetHeight);
    let room = parent.innerHeight;
    for (let n = frameElement.parentElement; n && n !== parent.document.body; n = n.parentElement) {
      const own = n.matches('.jp-WindowedPanel-outer') || n.scrollHeight > n.clientHeight + 1 && n.clientHeight > 200; // not one as high as we are
      if (own && /auto|scroll/.test(parent.getComputedStyle(n).overflowY)) room = Math.min(room, n.clientHeight);
    }
    frameElement.style.height = `${Math.round(Math.min(wanted, Math.max(room - 24, data.sizes.lowest)))}px`;
  } catch { /* another origin's page: the height that the html asks for stays */ }
}

// What of this frame is in sight is known to an observer, whoever's page it is in. The panel is
// drawn at the foot of that, over the lanes; at its head, if it would hide the slice it tells of.
const sight = new IntersectionObserver(entries => {
  const box = entries[entries.length - 1].intersectionRect;
  seen = box.height ? [box.top, box.bottom] : null;
  dock();
}, { threshold: Array.from({ length: 51 }, (_, i) => i / 50) });
function watch() { sight.disconnect(); sight.observe(document.documentElement); }

function dock() {
  details.style.transform = '';
  if (!seen || details.hidden) return;
  const box = details.getBoundingClientRect();
  let up = Math.max(0, box.bottom - Math.min(seen[1], innerHeight));
  if (picked && up) {
    const y = middleOf(picked) - lanes.scrollTop + lanes.getBoundingClientRect().top;
    if (y > box.top - up - 10 && y < box.bottom - up) up = box.top - Math.max(seen[0], 0);
  }
  if (up > 0) details.style.transform = `translateY(${-Math.round(up)}px)`;
}

// ---- at the mouse -----------------------------------------------------------------------
function hover(event) {
  const s = under(event), [px, y] = inBox(event), { track } = over(y + lanes.scrollTop);
  const counter = !s && px > NAMES && track && track.series.length && track;
  canvas.style.cursor = s ? 'pointer' : 'default';
  tip.hidden = !s && !counter;
  if (tip.hidden) return;
  tip.textContent = '';
  if (s) {
    const args = data.args[s.at];
    make('div', '', s.name.slice(0, 400), tip);
    make('div', 'pale', [args.type, s.mark ? `under way for ${length(s.dur)}` : length(s.dur), s.track.name].filter(Boolean).join(' · '), tip);
    for (const key of ['inputs', 'outputs', 'shape', 'tensor', 'bytes', 'peer']) {
      if (args[key] !== undefined && args[key] !== '') make('div', 'pale', `${key} ${String(flat(args[key])).slice(0, 120)}`, tip);
    }
  } else {
    for (const { name, ts, value } of counter.series) {
      const i = lower(ts, ns(px)) - 1;
      if (i >= 0) make('div', '', `${name} ${amount(value[i], counter.name)}`, tip);
    }
  }
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < Math.min(innerHeight, seen ? seen[1] : Infinity);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${below ? event.clientY + 18 : Math.max(2, event.clientY - tip.offsetHeight - 10)}px`;
}

// ---- notes ------------------------------------------------------------------------------
function say(content) { // a note over the view, in sight, closed by a click on ✕ or Esc
  hush();
  const note = make('div', 'message', undefined, document.body);
  note.setAttribute('role', 'note');
  note.append(content);
  button('✕', 'close', note, hush).className = 'close';
  const eye = new IntersectionObserver(([{ intersectionRect: box }]) => {
    eye.disconnect();
    note.style.maxHeight = `${Math.max(80, box.height - 44)}px`;
    note.style.top = `${Math.max(box.top + 8, box.bottom - note.offsetHeight - 36)}px`;
  });
  eye.observe(document.documentElement);
}
const hush = () => document.querySelectorAll('.message').forEach(n => n.remove());
function help() {
  const table = document.createElement('table');
  for (const [keys, what] of KEYS) { const r = table.insertRow(); r.insertCell().textContent = keys; r.insertCell().textContent = what; }
  return table;
}
