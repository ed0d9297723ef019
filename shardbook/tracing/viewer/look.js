// Colours of the two themes, the style sheet, and the keys that the `?` note lists.

const LIGHT = { page: '#ffffff', ink: '#1b1f24', pale: '#57606a', band: '#eef1f5', line: '#d5dae0', grid: '#eceff2', field: '#ffffff', flow: '#3d444d', pick: '#000000', area: '#0072B2' };
const DARK = { page: '#111418', ink: '#e8ebee', pale: '#a2abb5', band: '#22272e', line: '#3a424b', grid: '#23282f', field: '#0c0e11', flow: '#c3cad2', pick: '#ffffff', area: '#56B4E9' };

const STYLE = `
  html, body { margin: 0; height: 100%; overflow: hidden; background: var(--page); color: var(--ink);
    font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
  body { display: flex; flex-direction: column; border: 1px solid var(--line); box-sizing: border-box; border-radius: 4px; position: relative; }
  .bar { display: flex; flex-wrap: wrap; gap: 4px 6px; align-items: center; padding: 4px 8px; min-height: 24px; flex: none; }
  .bar b { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; min-width: 40px; max-width: 100%; }
  .bar .facts, .foot .hint { color: var(--pale); min-width: 0; }
  .space { flex: 1; }
  .label { background: #D55E00; color: #000; border-radius: 3px; padding: 1px 6px; font-weight: 600; }
  .foot { border-top: 1px solid var(--line); padding: 3px 8px; }
  .foot .hint { flex: 1 1 240px; }
  button, input { font: inherit; color: inherit; background: var(--field); border: 1px solid var(--line); border-radius: 3px; padding: 2px 7px; }
  button { cursor: pointer; } button:hover { border-color: var(--area); }
  button[aria-pressed=true] { border-color: var(--area); background: var(--band); }
  :focus-visible, .lanes:focus-visible { outline: 2px solid var(--area); outline-offset: -2px; }
  input { width: 108px; }
  input::placeholder { color: var(--pale); opacity: 1; }
  .found { color: var(--pale); min-width: 48px; }
  .lanes { flex: 1; min-height: 0; position: relative; overflow: hidden; border-top: 1px solid var(--line); scroll-padding: 26px 0 4px; }
  .figure { flex: 0 1 auto; min-height: 160px; overflow: auto; background: #fff; border-bottom: 1px solid var(--line); }
  .figure g[role=button]:hover rect { stroke-width: 2; } .figure g:focus-visible { outline: 2px solid #0072B2; }
  .figure ~ .lanes { min-height: 110px; }
  .lanes.active { box-shadow: inset 0 0 0 1px var(--area); } .lanes.tall { overflow-y: auto; }
  canvas { display: block; position: sticky; top: 0; touch-action: pan-y; }
  canvas.axis { z-index: 2; pointer-events: none; }
  .rank, .lane { position: absolute; left: 0; z-index: 1; border: 0; background: none; border-radius: 0; text-align: left; overflow: hidden;
    text-overflow: ellipsis; white-space: nowrap; box-sizing: border-box; font-size: 11px; margin: 0; }
  .rank { padding: 0 6px; font-weight: 700; max-width: 100%; }
  .lane { padding: 0 4px 0 10px; color: var(--pale); line-height: 16px; }
  button.lane:hover, .rank:hover { text-decoration: underline; }
  .scale { position: absolute; right: 4px; font-size: 9.5px; line-height: 10px; }
  .tip { position: absolute; pointer-events: none; max-width: min(420px, 90vw); background: var(--page); color: var(--ink); border: 1px solid var(--line);
    border-radius: 4px; padding: 4px 8px; box-shadow: 0 2px 8px #0004; z-index: 4; white-space: pre-wrap; overflow-wrap: anywhere; }
  .tip .pale { color: var(--pale); }
  .details { max-height: min(190px, 45vh); overflow: auto; border-top: 2px solid var(--area); background: var(--page); padding: 4px 8px; position: relative; flex: none; z-index: 3; }
  .details h1 { font-size: 13px; margin: 2px 0 4px; overflow-wrap: anywhere; padding-right: 24px; }
  .details table { border-spacing: 0; } .details td, .details th { padding: 1px 16px 1px 0; vertical-align: top; white-space: pre-wrap; overflow-wrap: anywhere;
    font: 11.5px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
  .details td:first-child { color: var(--pale); min-width: 72px; max-width: 180px; }
  .details th { text-align: left; color: var(--pale); } .details .sums td:first-child { color: var(--ink); max-width: 340px; }
  .details .sums td:nth-child(n+2), .details .sums th:nth-child(n+2) { text-align: right; white-space: nowrap; }
  .details p { margin: 2px 0 4px; color: var(--pale); }
  .close { position: absolute; right: 6px; top: 4px; border: 0; background: none; font-size: 14px; }
  .message { position: absolute; left: 8px; right: 8px; margin-left: auto; max-width: 480px; box-sizing: border-box; overflow: auto; background: var(--page); border: 1px solid var(--area); border-radius: 4px; padding: 8px 28px 8px 10px; z-index: 5; line-height: 1.5; }
  .message code { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, monospace; background: var(--band); padding: 0 3px; }
  .legend { display: flex; gap: 1px 2px; flex-wrap: wrap; padding: 0 6px; margin: 1px 0 3px; flex: none; color: var(--pale); }
  .legend button { border-color: transparent; background: none; padding: 0 4px; line-height: 16px; }
  .legend button:hover, .legend button[aria-pressed=true] { color: var(--ink); border-color: var(--area); }
  .legend i { display: inline-block; width: 10px; height: 10px; margin-right: 4px; border-radius: 2px; vertical-align: -1px; }
  [hidden] { display: none !important; }`;

const KEYS = [
  ['click', 'what a slice is; from then on the wheel zooms, until Esc or until the mouse leaves'],
  ['Ctrl (or ⌘) + wheel', 'zoom at once; without Ctrl and before a click the wheel scrolls the notebook'],
  ['W S, + −', 'zoom in, out'],
  ['drag', 'select a stretch of the lanes it crosses (in the axis: of all): count, total, mean, most'],
  ['A D, ← →, Shift + wheel, Shift + drag', 'move in time'],
  ['↑ ↓, wheel over the names', 'scroll the lanes'],
  ['click on a name; Tab, then Enter', 'fold a rank or a lane to one row'],
  ['double click, F', 'zoom to the slice or to the stretch'], [', .', 'slice before, after'],
  ['/ then Enter', 'search, next hit'], ['0', 'whole trace'], ['Esc', 'clear selection, search and filter'],
];
