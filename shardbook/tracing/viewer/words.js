// Times, sizes and names as people read them; which ink reads best on a colour.

function length(ns, span) { // a time; with a span, as exact as an axis of that span needs
  const size = Math.abs(span ?? ns);
  const [unit, name] = size >= 1e9 ? [1e9, 's'] : size >= 1e6 ? [1e6, 'ms'] : size >= 1e3 ? [1e3, 'µs'] : [1, 'ns'];
  if (span !== undefined) return `${+(ns / unit).toFixed(Math.max(0, 2 - Math.floor(Math.log10(span / unit))))} ${name}`;
  return `${+(ns / unit).toPrecision(4)} ${name}`;
}

function size(bytes) { // 4.2 MB
  const power = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(bytes, 1)) / 3)));
  return `${+(bytes / 1000 ** power).toPrecision(3)} ${['B', 'kB', 'MB', 'GB', 'TB'][power]}`;
}

function amount(value, name) { // of a counter: bytes where its name says so
  const unit = /\((\w+)\)$/.exec(name); // "memory (MB)"
  if (unit) return `${+value.toPrecision(4)} ${unit[1]}`;
  return /mem|byte|alloc/i.test(name) ? size(value) : `${+value.toPrecision(4)}`;
}

function flat(value) { // args as text: a short list on one line, a dict a line a key
  if (value === null || typeof value !== 'object') return String(value);
  if (Array.isArray(value)) return value.map(flat).join(', ');
  return Object.entries(value).map(([k, v]) => `${k}: ${flat(v)}`).join('\n');
}

const plural = (n, one, many = one + 's') => `${n.toLocaleString('en')} ${n === 1 ? one : many}`;

function dark(colour) { // does white read better on it? (WCAG 2 relative luminance)
  const [r, g, b] = [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16) / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.179;
}

function cut(text, room) { // with … where it is too long; of thousands of letters most never fit
  text = text.slice(0, Math.ceil(room / 2) + 1);
  if (pen.measureText(text).width <= room) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const mid = (low + high + 1) >> 1;
    if (pen.measureText(text.slice(0, mid) + '…').width <= room) low = mid; else high = mid - 1;
  }
  return low ? text.slice(0, low) + '…' : '';
}

function short(text, room) { // of layers.0.attn.wq the end says most: attn.wq, wq
  if (text.length < room && pen.measureText(text).width <= room) return text;
  const parts = text.length < 500 ? text.replace(/ \(backward\)$/, '').split('.') : [text];
  if (parts.some(part => /\s/.test(part))) return cut(text, room); // no dotted name
  let end = parts[parts.length - 1];
  for (let i = 1; i < parts.length; i++) {
    if (/^\d/.test(parts[i])) continue; // a bare "12" says nothing
    end = parts.slice(i).join('.');
    if (pen.measureText(end).width <= room) return end;
  }
  return /^\d/.test(end) && parts.length > 1 ? '' : cut(end, room);
}

function caption(s, room) { // on a bar: the bytes of a call too, where there is room
  const name = s.name.replace(/ \((paced|simulated|virtual)\)$/, '');
  const bytes = (s.cat === 'collective' || s.cat === 'p2p') && data.args[s.at].bytes;
  if (bytes) {
    const both = `${name} ${size(bytes)}`;
    if (pen.measureText(both).width <= room) return both;
  }
  return short(name, room);
}
