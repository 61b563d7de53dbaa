"""The style of a report's page."""

STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfa; --card: #fff; --ink: #1d2229; --dim: #67707c; --rule: #e4e6e9;
  --c0: #2463c4; --c1: #d9730d; --c2: #158a63; --c3: #b3307f; --c4: #6a52c7; --c5: #8b6b14;
  --warn: #b42318; --warnbg: #fef2f0 }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --card: #1c2026; --ink: #e6e8eb; --dim: #969fab;
  --rule: #30363e;  --c0: #6ea8fe; --c1: #ffa657; --c2: #56d39b; --c3: #f28cc4; --c4: #b3a1ff; --c5: #e0c060;
  --warn: #ff9b8f; --warnbg: #33201f } }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 32px 20px 64px }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 17px; margin: 36px 0 10px } p { margin: 4px 0 }
.dim, figcaption + .legend, footer { color: var(--dim); font-size: 13px } code { font: 12.5px ui-monospace, monospace }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 10px 14px }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0 }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px 18px }
.tile b { display: block; font-size: 24px; font-weight: 600; font-variant-numeric: tabular-nums }
.tile span { color: var(--dim); font-size: 13px }
.verdict { font-size: 17px; margin: 16px 0 }
.warn { background: var(--warnbg); color: var(--warn); border-radius: 10px; padding: 10px 16px; margin: 16px 0 }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 60% }
th, td { text-align: right; padding: 5px 14px; border-bottom: 1px solid var(--rule); white-space: nowrap }
th { color: var(--dim); font-weight: 500 } th:first-child, td:first-child { text-align: left; padding-left: 0 }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 16px }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px 14px }
figcaption { font-weight: 600 } .legend { display: flex; flex-wrap: wrap; gap: 2px 14px; min-height: 20px }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px }
svg { width: 100%; height: auto } svg text { font: 11px system-ui, sans-serif; fill: var(--dim) }
svg .label { fill: var(--ink) } svg .grid { stroke: var(--rule) } svg .tick { stroke: var(--dim) }
svg polyline { fill: none; stroke-width: 2; stroke-linejoin: round }
svg line.limit { stroke: var(--warn); stroke-dasharray: 5 4 } svg text.limit { fill: var(--warn) }
"""
