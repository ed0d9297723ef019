// Drawing: slices, counters, arrows and the axis, on one canvas and a strip for the axis.

const x = ns => NAMES + (ns - from) / (to - from) * (width - NAMES);
const ns = px => from + (px - NAMES) / (width - NAMES) * (to - from);
const middle = () => (NAMES + width) / 2;
const draw = () => { pending = pending || requestAnimationFrame(paint); };

function paint() {
  pending = 0;
  const ratio = devicePixelRatio || 1, wide = lanes.clientWidth, high = lanes.clientHeight;
  if (!wide || !high) return;
  if (wide !== width || high !== height || canvas.width !== Math.round(wide * ratio)) {
    width = wide; height = high;
    for (const [c, tall] of [[canvas, high], [axis, AXIS - 2]]) {
      c.width = Math.round(wide * ratio); c.height = Math.round(tall * ratio);
      c.style.width = wide + 'px'; c.style.height = tall + 'px';
    }
    axis.style.marginBottom = 2 - AXIS + 'px';
  }
  filler.style.height = Math.max(0, total - high) + 'px';
  lanes.classList.toggle('tall', total > high + 1 && active);
  const top = lanes.scrollTop, font = getComputedStyle(document.body).font.replace('12px', '11px');
  for (const p of [pen, ruler]) { p.setTransform(ratio, 0, 0, ratio, 0, 0); p.font = font; p.textBaseline = 'middle'; }
  pen.fillStyle = colours.page; pen.fillRect(0, 0, width, height);
  const marks = ticks();
  pen.fillStyle = colours.grid;
  for (const t of marks) if (x(t) >= NAMES - 2) pen.fillRect(Math.round(x(t)), AXIS, 1, height);
  for (const head of heads) {
    const y = head.y - top;
    if (y > height) break;
    if (y + HEADER > 0) {
      pen.fillStyle = colours.band; pen.fillRect(0, y, head.shut ? NAMES - 3 : width, HEADER - 2);
      if (head.shut) paintHead(head, y);
    }
    for (const track of head.tracks) {
      const y = track.y - top;
      if (!track.shown || y > height || y + track.height < 0) continue;
      if (track.series.length) paintCounter(track, y); else paintTrack(track, y);
    }
  }
  paintFlows(top);
  paintRange(top);
  paintAxis(marks);
}

function paintAxis(marks) {
  ruler.fillStyle = colours.page; ruler.fillRect(0, 0, width, AXIS);
  ruler.fillStyle = colours.line; ruler.fillRect(0, AXIS - 3, width, 1);
  ruler.fillStyle = colours.pale;
  for (const t of marks) {
    if (x(t) < NAMES - 1) continue;
    ruler.fillRect(Math.round(x(t)), AXIS - 8, 1, 6);
    const words = length(t, to - from);
    if (x(t) + 4 + ruler.measureText(words).width < width) ruler.fillText(words, x(t) + 4, AXIS / 2 - 2);
  }
  if (!range) return;
  const a = Math.max(x(range.from), NAMES), words = `↔ ${length(range.to - range.from)}`;
  const wide = ruler.measureText(words).width + 8, left = Math.min(a, width - wide);
  ruler.fillStyle = colours.page; ruler.fillRect(left, 0, Math.max(wide, Math.min(x(range.to), width) - left), AXIS - 3);
  ruler.fillStyle = colours.ink; ruler.fillText(words, left + 4, AXIS / 2 - 2);
}

function paintRange(top) { // the stretch that was dragged over, in the lanes that it covers
  if (!range) return;
  const a = Math.max(x(range.from), NAMES - 2), b = Math.min(x(range.to), width);
  if (b < a) return;
  pen.fillStyle = pen.strokeStyle = colours.area; pen.lineWidth = 1;
  for (const [y0, y1] of range.bands()) {
    pen.globalAlpha = 0.18; pen.fillRect(a, y0 - top, b - a, y1 - y0);
    pen.globalAlpha = 1; pen.strokeRect(a + 0.5, y0 - top + 0.5, b - a - 1, y1 - y0 - 1);
  }
}

function ticks() {
  const rough = (to - from) / Math.max(3, (width - NAMES) / 110), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(m => m * power >= rough), out = [];
  for (let t = Math.ceil(Math.max(from, 0) / step) * step; t <= Math.min(to, end * 1.02); t += step) out.push(t);
  return out;
}

function paintTrack(track, y) {
  if (track.one) for (const list of track.byRow) paintRow(list, y, ROW, 'leaves');
  else track.byRow.forEach((list, row) => {
    const top = y + row * track.px;
    if (top < height && top + track.px > 0) paintRow(list, top, track.px, track.px === ROW);
  });
}

function paintHead(head, y) { // a whole rank in one row
  for (const list of stacked(head)) paintRow(list, y + 1, HEADER - 2, 'leaves');
  for (const track of head.tracks) if (track.loose) for (const list of layers(track)) paintRow(list, y + HEADER - 7, 6, false);
}

function paintRow(list, top, tall, words) {
  let last = -1; // the pixel drawn last: slices below a pixel share one
  for (let i = firstEnding(list, from); i < list.length; i++) {
    const s = list[i];
    if (s.ts > to) break;
    const a = Math.max(x(s.ts), NAMES - 2), b = Math.min(x(s.end), width + 2);
    const lit = !hits || hits.has(s);
    if (b - a < 1 && a < last + 0.5 && s !== picked && !(hits && lit)) continue;
    last = Math.max(b, a + 1);
    pen.globalAlpha = lit ? 1 : 0.16;
    pen.fillStyle = data.kinds[s.kind][1];
    let room = b - a;
    if (s.mark) {
      pen.fillRect(a, top, 3, tall - 2);
      room = words ? Math.min(i + 1 < list.length ? x(list[i + 1].ts) : width, a + 160) - a - 3 : 0;
    } else if (s.dur === 0) { // an instant
      pen.beginPath(); pen.moveTo(a, top); pen.lineTo(a + 5, top + tall - 3); pen.lineTo(a - 5, top + tall - 3); pen.fill();
    } else {
      const w = Math.max(b - a - (b - a > 4 ? 0.75 : 0), 1);
      pen.fillRect(a, top, w, tall - 2);
      if (s.cat === 'backward') { pen.fillStyle = '#0006'; pen.fillRect(a, top + tall - 5, w, 3); }
    }
    // of what lies in one row only what covers itself is named
    if (words && room > (s.mark ? 34 : 14) && (words !== 'leaves' || s.own * 2 > s.dur)) {
      pen.fillStyle = s.mark ? colours.ink : ink[s.kind];
      pen.fillText(caption(s, room - (room > 26 ? 8 : 3)), a + (s.mark ? 6 : room > 26 ? 4 : 2), top + tall / 2 - 0.5);
    }
    if (s === picked) {
      pen.globalAlpha = 1; pen.strokeStyle = colours.pick; pen.lineWidth = 2;
      pen.strokeRect(a + 0.5, top, Math.max(b - a - 1, s.mark ? 3 : 2), tall - 2);
    }
  }
  pen.globalAlpha = 1;
}

function paintCounter(track, y) {
  const floor = y + COUNTER - 5, tall = COUNTER - 10, { low, most } = track, scale = tall / (most - low || 1);
  pen.fillStyle = colours.line; pen.fillRect(NAMES, floor - tall, width, 1); pen.fillRect(NAMES, floor, width, 1);
  for (const { ts, value } of track.series) {
    let i = Math.max(0, lower(ts, from) - 1), px = -1;
    pen.beginPath(); pen.moveTo(Math.max(x(Math.max(ts[i], from)), NAMES), floor);
    for (; i < ts.length && ts[i] <= to; i++) {
      const level = floor - (value[i] - low) * scale, after = i + 1 < ts.length ? ts[i + 1] : Math.max(end, ts[i]);
      pen.lineTo(Math.max(x(ts[i]), NAMES), level); px = Math.max(Math.min(x(after), width), NAMES);
      pen.lineTo(px, level);
    }
    pen.lineTo(px, floor);
    pen.fillStyle = colours.area; pen.globalAlpha = 0.3; pen.fill();
    pen.globalAlpha = 1; pen.strokeStyle = colours.area; pen.lineWidth = 1.2; pen.stroke();
  }
}

function paintFlows(top) {
  const busy = flows.length > 400 && to - from > end / 3;
  const seen = flows.filter(f => f.t1 >= from && f.t0 <= to).length, crowd = Math.min(0.85, Math.max(0.25, 30 / seen));
  pen.save();
  pen.beginPath(); pen.rect(NAMES - 2, 0, width, height); pen.clip();
  for (const f of flows) {
    const on = picked && (f.a === picked || f.b === picked);
    if (busy && !on) continue;
    const x0 = x(f.t0), x1 = x(f.t1);
    if (Math.max(x0, x1) < NAMES || Math.min(x0, x1) > width) continue;
    const y0 = middleOf(f.a) - top, y1 = middleOf(f.b) - top;
    if (Math.max(y0, y1) < AXIS || Math.min(y0, y1) > height) continue;
    pen.strokeStyle = pen.fillStyle = on ? '#D55E00' : colours.flow;
    pen.lineWidth = on ? 2 : 1; pen.globalAlpha = on ? 1 : hits ? 0.2 : crowd;
    const bend = Math.min(60, Math.max(10, Math.abs(x1 - x0) / 2));
    pen.beginPath(); pen.moveTo(x0, y0); pen.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1 - 5, y1); pen.stroke();
    pen.beginPath(); pen.moveTo(x1, y1); pen.lineTo(x1 - 7, y1 - 3.5); pen.lineTo(x1 - 7, y1 + 3.5); pen.fill();
  }
  pen.restore();
}
