// Where each lane is, top to bottom; ranks and lanes fold to one row by their names, which are
// buttons over the canvas: reached by Tab, folded by Enter, read out by a screen reader.

function arrange() {
  let y = AXIS, head = null;
  heads = [];
  for (const track of tracks) {
    if (!head || track.pid !== head.pid) {
      head = { pid: track.pid, y, tracks: [], shut: folded.has(track.pid) };
      heads.push(head);
      y += HEADER;
    }
    head.tracks.push(track);
    track.head = head;
    track.shown = !head.shut && (!track.memory || memory);
    track.one = folded.has(track);
    track.y = y;
    track.height = track.series.length ? COUNTER : track.one ? ROW : track.rows * track.px;
    if (track.shown) y += track.height + GAP;
  }
  total = y;
  names();
}

function names() {
  for (const head of heads) {
    const name = nameOf.get(head.pid);
    const node = tags.get(head.pid) || make('button', 'rank', '', lanes);
    tags.set(head.pid, node);
    node.onclick = () => fold(head.pid);
    node.textContent = `${head.shut ? '▸' : '▾'} ${name}`;
    node.title = name;
    node.setAttribute('aria-expanded', !head.shut);
    node.setAttribute('aria-label', `${name}, ${plural(head.tracks.length, 'lane')}`);
    put(node, head.y, HEADER - 2, head.shut ? NAMES - 4 : 0);
    for (const track of head.tracks) nameLane(track, name);
  }
}

function nameLane(track, rank) {
  const folds = track.rows > 1 && !track.series.length;
  let node = tags.get(track);
  if (!node) {
    node = make(folds ? 'button' : 'div', 'lane', '', lanes);
    if (folds) node.onclick = () => fold(track);
    tags.set(track, node);
    if (track.series.length) scale(track, node);
    else node.append(make('span'));
  }
  node.hidden = !track.shown;
  if (!track.shown) return;
  const name = track.series.length ? track.name.replace(/ \(\w+\)$/, '') : track.name;
  node.firstChild.textContent = (folds ? (track.one ? '▸ ' : '▾ ') : '') + name;
  const what = `${rank}, ${track.name}` + (track.series.length ? '' : `: ${plural(track.slices.length, 'slice')} in ${plural(track.rows, 'row')}`);
  node.title = what;
  if (folds) { node.setAttribute('aria-label', what); node.setAttribute('aria-expanded', !track.one); }
  put(node, track.y, track.series.length ? COUNTER : Math.min(track.height, ROW), NAMES - 4);
}

function scale(track, node) { // the highest and the lowest value that a counter's lane can show
  node.append(make('span'));
  make('span', 'scale', amount(track.most, track.name), node).style.top = '18px';
  make('span', 'scale', amount(track.low, track.name), node).style.bottom = '1px';
}

function put(node, y, height, width) {
  node.style.top = y + 'px'; node.style.height = height + 'px';
  node.style.width = width ? width + 'px' : '';
}

function fold(what) {
  if (!folded.delete(what)) folded.add(what);
  arrange(); resize(); draw();
}

function middleOf(s) { // the y of a slice in the lanes, wherever it is drawn now
  const { track } = s, { head } = track;
  if (head.shut) return head.y + HEADER / 2 - 1;
  return track.y + (track.one ? ROW / 2 : (s.row + 0.5) * track.px) - 1;
}

function over(y) { // what is drawn at this height: { head } of a folded rank, or { track, row }
  for (const head of heads) {
    if (y < head.y) break;
    if (y < head.y + HEADER) return head.shut ? { head } : {};
    const track = head.tracks.find(t => t.shown && y >= t.y && y < t.y + t.height);
    if (track) return { track, row: Math.floor((y - track.y) / track.px) };
  }
  return {};
}

// Bottom to top: what a row that stands for many shows. Nested slices cover what they lie in.
const layers = track => track.series.length || track.memory ? [] : track.byRow;
function stacked(head) { // modules below, then what they wait for, then the kernels with set times
  const order = head.tracks.filter(t => !t.loose);
  order.sort((a, b) => (a.paced ? 1 : 0) - (b.paced ? 1 : 0));
  return order.flatMap(layers);
}
