// The packed columns as slices in rows, and back to Chrome's format for Perfetto and for a file.

function unpack(data) { // columns to objects: slices in rows, each row sorted by time
  const slices = [];
  const tracks = data.tracks.map(track => {
    let ts = 0;
    const made = { ...track, byRow: Array.from({ length: track.rows }, () => []), most: 0, low: 0 };
    const marks = new Set(track.marks);
    made.slices = track.dur.map((dur, i) => {
      ts += track.ts[i];
      // a message under way is drawn as a mark at its start, and ends there for what is drawn
      const mark = marks.has(i), text = track.text[i];
      const s = { track: made, ts, dur, end: mark ? ts : ts + dur, mark, own: dur + track.own[i], row: track.row[i], kind: track.kind[i], text, cat: data.texts[track.cat[i]], at: track.args[i], name: data.texts[text] };
      made.byRow[s.row].push(s);
      return s;
    });
    for (const s of made.slices) slices.push(s);
    // a counter is drawn from 0, or from its lowest value where it hardly moves; its scale says which
    let low = Infinity, most = -Infinity;
    for (const { value } of track.series) for (const v of value) { if (v < low) low = v; if (v > most) most = v; }
    if (most >= low) {
      made.most = Math.max(most, 0);
      made.low = low < 0 || low > made.most / 2 && low < made.most ? low : 0;
    }
    return made;
  });
  const flows = data.flows.map(([t, i, t0, u, j, t1]) => ({ a: tracks[t].slices[i], t0, b: tracks[u].slices[j], t1 }));
  return { tracks, slices, flows };
}

function chrome() { // back to Chrome's format, for Perfetto
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
    for (const { name, ts, value } of track.series) {
      // Perfetto puts the series behind the name: "memory (MB)" and "MB" are "memory MB" there
      const counter = track.name.endsWith(` (${name})`) ? track.name.slice(0, -name.length - 3) : track.name;
      ts.forEach((t, i) => events.push({ ph: 'C', pid, name: counter, ts: us(t), args: { [name]: value[i] } }));
    }
    if (!track.slices.length) return;
    // Perfetto drops slices that overlap without nesting: those are spread over threads that nest
    const nests = !track.marks.length && track.byRow.every((row, r) => r === 0 || row.every(s => within(track.byRow[r - 1], s)));
    const spread = nests ? [track.slices] : apart(track.slices);
    spread.forEach((list, r) => {
      const tid = thread({ pid: track.pid, tid: nests ? track.tid : `${track.tid}/${r}` });
      events.push({ ph: 'M', name: 'thread_name', pid, tid, args: { name: r ? `${track.name} ${r + 1}` : track.name } });
      events.push({ ph: 'M', name: 'thread_sort_index', pid, tid, args: { sort_index: index } });
      for (const s of list) {
        tids.set(s, tid);
        events.push({ ph: 'X', pid, tid, name: s.name, cat: s.cat || undefined, ts: us(s.ts), dur: us(s.dur), args: data.args[s.at] });
      }
    });
  });
  flows.forEach((f, id) => {
    if (f.a.dur < 2 || f.b.dur < 2) return; // an arrow's ends lie strictly inside their slices
    const end = (ph, s, t) => events.push({ ph, id: id + 1, name: 'flow', cat: 'flow', bp: 'e', pid: process.get(s.track.pid), tid: tids.get(s), ts: us(Math.min(Math.max(t, s.ts + 1), s.ts + s.dur - 1)) });
    end('s', f.a, f.t0); end('f', f.b, f.t1);
  });
  return events;
}

function apart(slices) { // lists in which slices are disjoint or one holds the other
  const lists = [], open = [];
  for (const s of slices) { // sorted by start, the longer first
    let n = 0;
    for (; n < lists.length; n++) {
      const ends = open[n];
      while (ends.length && ends[ends.length - 1] <= s.ts) ends.pop();
      if (!ends.length || s.ts + s.dur <= ends[ends.length - 1]) break;
    }
    if (n === lists.length) { lists.push([]); open.push([]); }
    lists[n].push(s); open[n].push(s.ts + s.dur);
  }
  return lists;
}

function within(row, s) { // is s inside one slice of the row above it?
  const o = row[firstEnding(row, s.ts)];
  return !!o && o.ts <= s.ts && o.ts + o.dur >= s.ts + s.dur;
}

function firstEnding(list, time) { // the first slice of a row that ends at or after this time
  let low = 0, high = list.length;
  while (low < high) { const mid = (low + high) >> 1; if (list[mid].end < time) low = mid + 1; else high = mid; }
  return low;
}

function lower(sorted, value) { // how many are at or below value
  let low = 0, high = sorted.length;
  while (low < high) { const mid = (low + high) >> 1; if (sorted[mid] <= value) low = mid + 1; else high = mid; }
  return low;
}
