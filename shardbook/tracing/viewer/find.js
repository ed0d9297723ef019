// Finding: the slice under the mouse, what a search or the legend asks for, sums over a stretch.

const inBox = event => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };

function under(event) {
  const [px, y] = inBox(event);
  if (px < NAMES - 2 || y < AXIS) return null;
  const { head, track, row } = over(y + lanes.scrollTop);
  if (head) {
    const loose = head.tracks.filter(t => t.loose).flatMap(layers);
    const low = y + lanes.scrollTop > head.y + HEADER - 8; // the strip of what is under way
    return nearest(low ? [...stacked(head), ...loose] : [...loose, ...stacked(head)], px);
  }
  if (!track || track.series.length) return null;
  return nearest(track.one ? track.byRow : [track.byRow[row] || []], px);
}

function nearest(rows, px) { // the last of the rows that has it is on top
  const time = ns(px), near = 3 * (to - from) / (width - NAMES);
  let best = null, distance = near;
  for (const list of rows.slice().reverse()) {
    for (let i = firstEnding(list, time - near); i < list.length && list[i].ts <= time + near; i++) {
      const s = list[i], away = Math.max(s.ts - time, time - s.end, 0);
      if (away < distance || away === distance && !best) { best = s; distance = away; }
    }
    if (best && distance === 0) return best;
  }
  return best;
}

function seek() { // search and legend: light what both ask for, count it
  const text = search.value.trim().toLowerCase();
  hits = null; hit = -1;
  if (text || only) {
    const inText = data.texts.map(t => t.toLowerCase().includes(text)), inArgs = data.args.map(a => JSON.stringify(a).toLowerCase().includes(text));
    hits = new Set(slices.filter(s => (!only || only.has(s.kind)) && (inText[s.text] || inArgs[s.at])));
  }
  for (const chip of chips) chip.setAttribute('aria-pressed', !!only && chip.kinds === only);
  found.hidden = !hits;
  found.textContent = hits ? `${hits.size.toLocaleString('en')} found` : '';
  draw();
}

function next(step) {
  if (!hits || !hits.size) return;
  const list = [...hits].sort((a, b) => a.ts - b.ts);
  hit = (hit + step + list.length) % list.length;
  found.textContent = `${hit + 1} of ${list.length}`;
  pick(list[hit], true);
}

// A stretch of time in some lanes. `covered` keeps ranks and lanes, so folding does not lose it.
function stretch(a, b, y0, y1) {
  const all = y0 < AXIS, covered = new Set();
  for (const head of heads) {
    const crossed = (y, height) => all || y0 + lanes.scrollTop < y + height && y1 + lanes.scrollTop > y;
    if (crossed(head.y, HEADER - 2)) { covered.add(head.pid); continue; } // the name's row: the whole rank
    for (const track of head.tracks) if (track.shown && crossed(track.y, track.height)) covered.add(track);
  }
  const bands = () => heads.flatMap(head => {
    if (covered.has(head.pid)) {
      const last = head.tracks.filter(t => t.shown).pop();
      return [[head.y, head.shut || !last ? head.y + HEADER - 2 : last.y + last.height]];
    }
    return head.tracks.filter(t => covered.has(t) && t.shown).map(t => [t.y, t.y + t.height]);
  });
  const inside = tracks.filter(t => covered.has(t) || covered.has(t.pid));
  return { from: Math.max(Math.min(a, b), 0), to: Math.min(Math.max(a, b), end), bands, inside };
}

function sums({ from, to, inside }) { // of all slices that touch the stretch, by name
  const byName = new Map();
  for (const track of inside) {
    for (const row of track.byRow) {
      for (let i = firstEnding(row, from); i < row.length && row[i].ts <= to; i++) {
        const s = row[i];
        if (s.end === from && s.ts < from) continue; // it ended as the stretch began
        const sum = byName.get(s.text) || { name: s.name, count: 0, total: 0, most: 0, bytes: 0 };
        byName.set(s.text, sum);
        sum.count++; sum.total += s.dur; sum.most = Math.max(sum.most, s.dur);
        sum.bytes += +data.args[s.at].bytes || 0;
      }
    }
  }
  return [...byName.values()].sort((a, b) => b.total - a.total);
}
