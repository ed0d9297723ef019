// Moving in time, and what the mouse and the keys do.

const fit = () => { from = -end * 0.01; to = end * 1.02; draw(); };
function show(a, b) { // a stretch of time, no narrower than 20 ns and no wider than the trace allows
  const span = Math.min(Math.max(b - a, 20), end * 1.2), mid = (a + b) / 2;
  const centre = Math.min(Math.max(mid, -end * 0.05), end * 1.05);
  from = centre - span / 2; to = centre + span / 2;
  tip.hidden = true;
  draw();
}
const zoom = (factor, px) => { const c = ns(Math.max(px, NAMES)); show(c - (c - from) * factor, c + (to - c) * factor); };
const move = share => { const d = (to - from) * share; show(from + d, to + d); };
const frame = s => show(s.ts - s.dur * 0.08 - 20, s.ts + s.dur * 1.08 + 20);

function reveal(s) {
  if (folded.delete(s.track.pid)) { arrange(); resize(); }
  if (s.end < from || s.ts > to) { const half = (to - from) / 2; show(s.ts + (s.end - s.ts) / 2 - half, s.ts + (s.end - s.ts) / 2 + half); }
  const y = middleOf(s) - ROW / 2;
  if (y < lanes.scrollTop + AXIS) lanes.scrollTop = y - AXIS - HEADER;
  if (y + ROW > lanes.scrollTop + lanes.clientHeight) lanes.scrollTop = y + 2 * ROW - lanes.clientHeight;
}

function activate(on) { // after a click the wheel is ours, until Esc or until the mouse leaves
  active = on;
  lanes.classList.toggle('active', on);
  lanes.classList.toggle('tall', on && total > lanes.clientHeight + 1);
  hint.textContent = on ? 'the wheel zooms here until Esc' : HINT;
}

function listen() {
  // The wheel belongs to the notebook, except with Ctrl or after a click. Sideways it moves in time.
  lanes.addEventListener('wheel', event => {
    const px = event.clientX - canvas.getBoundingClientRect().left;
    const tall = total > lanes.clientHeight + 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move((event.deltaX || event.deltaY) / width);
    else if (event.ctrlKey || event.metaKey || active && (px > NAMES || !tall)) {
      zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY)) * 0.003), px);
    } else return; // over the names it scrolls the lanes once they are ours, else the notebook
    event.preventDefault();
  }, { passive: false });
  document.documentElement.addEventListener('mouseleave', () => { if (!drag) activate(false); });
  addEventListener('blur', () => activate(false));

  canvas.onpointerdown = event => {
    if (event.button) return;
    lanes.focus({ preventScroll: true });
    activate(true);
    const [px, y] = inBox(event);
    drag = { x: px, y, from, to, scroll: lanes.scrollTop, moved: false, pan: event.shiftKey || event.pointerType === 'touch' };
    canvas.setPointerCapture(event.pointerId);
    tip.hidden = true;
  };
  canvas.onpointermove = event => {
    if (!drag) return hover(event);
    const [px, y] = inBox(event), dx = px - drag.x;
    drag.moved = drag.moved || Math.abs(dx) > 3 || drag.pan && Math.abs(y - drag.y) > 3;
    if (!drag.moved) return;
    if (drag.pan) {
      canvas.style.cursor = 'grabbing';
      const shift = dx / (width - NAMES) * (drag.to - drag.from);
      show(drag.from - shift, drag.to - shift);
      lanes.scrollTop = drag.scroll - (y - drag.y);
      return;
    }
    range = stretch(ns(Math.max(drag.x, NAMES)), ns(Math.max(px, NAMES)), Math.min(drag.y, y), Math.max(drag.y, y));
    draw();
  };
  canvas.onpointerup = event => {
    const was = drag;
    drag = null;
    if (!was) return;
    if (was.moved && was.pan) return;
    if (was.moved) { picked = null; lightBoxes(); tellRange(); return draw(); }
    const s = under(event);
    if (s) { range = null; pick(s); } // a click beside a slice leaves the selection as it is
  };
  canvas.onpointercancel = () => { drag = null; draw(); };
  canvas.onpointerleave = () => { tip.hidden = true; };
  canvas.ondblclick = event => { const s = under(event); if (s) frame(s); };
  lanes.onscroll = () => { draw(); dock(); };

  search.oninput = seek;
  search.onkeydown = event => {
    if (event.key === 'Enter') next(event.shiftKey ? -1 : 1);
    else if (event.key === 'Escape') { clear(); lanes.focus(); }
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
      0: () => fit(), f: () => { if (picked) frame(picked); else if (range) show(range.from, range.to); },
      ',': () => beside(-1), '.': () => beside(1), '/': () => search.focus(), '?': () => say(help()), escape: clear,
    }[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
  });
}

function clear() { // Esc: notes, selection, search, legend filter; and the wheel is the notebook's
  hush(); activate(false);
  drag = range = picked = only = null;
  search.value = '';
  close(); lightBoxes(); seek();
}
