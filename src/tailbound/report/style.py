"""The page's style sheet; colours are the variables that ``palette`` defines."""

STYLE = """
*,*::before,*::after{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
  font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
main{max-width:800px;margin:0 auto;padding:40px 20px 72px}
.eyebrow{margin:0;color:var(--muted);font-size:.875rem}
.whole{white-space:nowrap}
h1{margin:.25em 0 .7em;font-size:2rem;line-height:1.2;letter-spacing:-.015em;
  text-wrap:balance}
h2{margin:0 0 .6em;font-size:1.25rem;line-height:1.3}
section{margin-top:52px}
.warning{margin:0 0 12px;padding:10px 14px;border-left:4px solid var(--fixed);
  background:var(--critical)}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:12px}
.tile{display:flex;flex-direction:column;padding:12px 14px;
  border:1px solid var(--rule);border-radius:8px}
.tile .label{color:var(--muted);font-size:.8125rem}
.tile .ratio{font-size:1.75rem;font-weight:700;line-height:1.25;
  font-variant-numeric:tabular-nums}
.tile .values{font-size:.875rem;color:var(--muted);white-space:nowrap;
  font-variant-numeric:tabular-nums}
.fixed{color:var(--fixed);font-weight:600}
.adaptive{color:var(--adaptive);font-weight:600}
.verdict{margin:20px 0 0;font-size:1.0625rem}
ul.verdict{margin-top:12px;padding-left:1.2em;font-size:1rem}
ul.verdict li{margin-top:4px}
.note,figcaption{color:var(--muted);font-size:.9375rem}
.note{margin:.6em 0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:7px 0 7px 16px;border-bottom:1px solid var(--rule);text-align:right;
  vertical-align:baseline}
th:first-child,td:first-child{padding-left:0}
tbody th{font-weight:400;text-align:left;color:var(--muted)}
thead th{vertical-align:bottom;font-weight:600}
thead small{display:block;font-weight:400;color:var(--muted);font-size:.8125rem}
.comparison{width:100%}
.comparison td{white-space:nowrap}
.comparison .main th{color:var(--ink)}
.comparison .main td{font-weight:600}
figure{margin:0}
figcaption{margin-top:8px}
.plot svg{display:block;width:100%;height:auto;overflow:visible}
.plot svg *{stroke-linejoin:round;stroke-linecap:butt}
.plot svg text{font-family:inherit;paint-order:stroke;stroke:var(--page);
  stroke-width:3px}
.plot.narrow{display:none}
.columns{display:grid;grid-template-columns:3fr 2fr;gap:12px 40px;align-items:start}
.pairs{width:100%;font-size:.9375rem}
.pairs caption{padding-bottom:4px;text-align:left;font-weight:600}
.pairs td{overflow-wrap:anywhere}
details{margin-top:10px}
summary{cursor:pointer;font-weight:600;padding:6px 0}
.decisions{width:100%;font-size:.9375rem}
.decisions td:last-child,.decisions th:last-child{text-align:left;width:60%}
@media (max-width:620px){
main{padding:24px 16px 56px}
h1{font-size:1.5rem}
section{margin-top:40px}
.tiles{grid-template-columns:repeat(2,1fr)}
.plot.wide{display:none}
.plot.narrow{display:block}
.columns{grid-template-columns:1fr}
.comparison{font-size:.875rem}
th,td{padding-left:8px}
}
@media print{details>*{display:block}section{break-inside:avoid}}
"""
