// A paper's figure over the lanes. A click on a box goes to the first calls of its modules; the
// boxes whose module is picked in the lanes are framed.

let boxes = [];

function drawFigure() {
  const node = make('div', 'figure', undefined, document.body);
  const parsed = new DOMParser().parseFromString(data.figure.svg, 'image/svg+xml');
  const drawing = node.appendChild(document.importNode(parsed.documentElement, true));
  drawing.style.cssText = 'width:100%;height:auto;display:block';
  drawing.style.maxWidth = `${drawing.getAttribute('width')}px`;
  boxes = [...drawing.querySelectorAll('[data-box]')].map(box => {
    const names = data.figure.modules[box.dataset.box];
    const calls = names.map(name => slices.find(s => s.name === name && s.cat === 'forward')).filter(Boolean);
    if (calls.length) listenTo(box, calls);
    return { box, names };
  });
  return node;
}

function listenTo(box, calls) {
  const go = event => {
    event.stopPropagation();
    pick(calls[0], true);
    const a = Math.min(...calls.map(s => s.ts)), b = Math.max(...calls.map(s => s.end));
    show(a - (b - a) / 2, b + (b - a) / 2);
  };
  box.style.cursor = 'pointer';
  box.setAttribute('tabindex', 0);
  box.setAttribute('role', 'button');
  box.setAttribute('aria-label', `${box.querySelector('text').textContent}: show its slice`);
  box.onclick = go;
  box.onkeydown = event => { if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); go(event); } };
}

function lightBoxes() { // of the picked slice
  for (const { box, names } of boxes) {
    const rect = box.querySelector('rect'), on = !!picked && names.includes(picked.name) && picked.cat === 'forward';
    rect.setAttribute('stroke-width', on ? 3 : 1);
    box.setAttribute('aria-pressed', on);
    if (on) intoSight(box);
  }
}

function intoSight(box) { // by the figure's own scroll bar; the page stays where it is
  const a = box.getBoundingClientRect(), b = drawn.getBoundingClientRect();
  if (a.top < b.top) drawn.scrollTop -= b.top - a.top + 6;
  else if (a.bottom > b.bottom) drawn.scrollTop += a.bottom - b.bottom + 6;
}
