// The whole trace elsewhere: as a file, and in Perfetto served by the Jupyter server.

const json = () => JSON.stringify({ traceEvents: chrome(), displayTimeUnit: 'ms' });

function save() {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([json()], { type: 'application/json' }));
  link.download = 'trace.json';
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function openPerfetto() {
  const base = jupyter();
  const page = base ? `${base}shardbook/perfetto/index.html` : null;
  const there = page && await fetch(page, { method: 'HEAD' }).then(r => r.ok, () => false);
  const tab = there && window.open(`${page}#!/viewer`, '_blank');
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
    unfold(tab);
  });
}

// Perfetto sorts processes by how many slices they have, and shows them folded. The page is our
// own server's, so its workspace can be put in order from here once it has read the trace.
function unfold(tab) {
  const order = new Map(data.processes.map(([, name], i) => [name, i]));
  const until = Date.now() + 120000;
  const timer = setInterval(() => {
    try {
      if (tab.closed || Date.now() > until) return clearInterval(timer);
      const { workspace } = tab.app.trace;
      const place = node => order.get(node.name.replace(/ \d+$/, '')); // "rank 2 2": name and pid
      const ranks = workspace.children.filter(node => place(node) !== undefined);
      if (ranks.length < Math.min(order.size, tracks.length ? 1 : 0) || !tab.app.trace.timeline) return;
      clearInterval(timer);
      ranks.sort((a, b) => place(a) - place(b));
      for (const node of ranks) node.remove();
      for (const node of ranks) { workspace.addChildInOrder(node); if (ranks.length <= 16) node.expand(); }
      tab.app.raf?.scheduleFullRedraw?.();
    } catch { /* not read yet, or another version of Perfetto: it opens as it does by itself */ }
  }, 300);
}

function jupyter() { // the base URL of the Jupyter server whose page this is, if it is one
  try {
    const config = JSON.parse(parent.document.getElementById('jupyter-config-data').textContent);
    return new URL(config.baseUrl || '/', parent.location.href).href.replace(/\/?$/, '/');
  } catch { return null; }
}
