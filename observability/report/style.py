"""The style of a report: light and dark, narrow and wide, on screen and on paper."""

CSS = """
:root{color-scheme:light dark;--back:#f6f7f9;--card:#fff;--text:#1c2330;--soft:#5c6675;--rule:#dde1e8;--grid:#e8ebf0;
--accent:#2563eb;--good:#15803d;--poor:#b45309;--bad:#dc2626;--warn-back:#fff4d6;--warn:#7a4a00;
--c0:#2563eb;--c1:#db6b18;--c2:#0f9488;--c3:#8b93a1;--c4:#9333ea;--c5:#c0265d;--c6:#4d7c0f;--c7:#0e7490}
@media(prefers-color-scheme:dark){:root{--back:#12161d;--card:#1b212b;--text:#e4e8ee;--soft:#9aa5b4;--rule:#303947;
--grid:#29313d;--accent:#7aa9ff;--good:#5fcf85;--poor:#f0ad4e;--bad:#ff6b6b;--warn-back:#3a2f12;--warn:#ffd479;
--c0:#6ea2ff;--c1:#ff9d5c;--c2:#3fd0bf;--c3:#8792a3;--c4:#c58bff;--c5:#ff7aa8;--c6:#a3d65c;--c7:#5cd2ec}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1500px;margin:0 auto;padding:1.5rem clamp(.8rem,3vw,2.5rem) 4rem}
h1{font-size:1.55rem;line-height:1.25;margin:0 0 .3rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.4rem 0 .8rem}h3{font-size:1rem;margin:0}
p{margin:.3rem 0}.soft{color:var(--soft)}.small{font-size:.85rem}
a{color:var(--accent)}
.grid{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,23rem),1fr))}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:.9rem 1rem;min-width:0}
.tiles{display:grid;gap:.7rem;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));margin:1.2rem 0}
.tile b{display:block;font-size:1.35rem;font-weight:650;font-variant-numeric:tabular-nums;line-height:1.2}
.note{background:var(--warn-back);color:var(--warn);border-radius:10px;padding:.7rem 1rem;margin:1rem 0;
overflow-wrap:anywhere}
svg{display:block;width:100%;height:auto;margin-top:.4rem}
svg text{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}
svg .y{text-anchor:end}svg .x{text-anchor:middle}
path.grid{stroke:var(--grid);fill:none;stroke-width:1}
.line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.dots{fill:none;stroke:currentColor;stroke-width:6;stroke-linecap:round}
.faint{stroke-width:1;opacity:.55}.band{fill:currentColor;stroke:none;opacity:.16}.full{opacity:.75}
.bad{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:3 3;fill:none}
.hit{fill:transparent}.hit:hover{fill:var(--soft);fill-opacity:.18}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}
.c5{color:var(--c5)}.c6{color:var(--c6)}.c7{color:var(--c7)}
.legend{display:flex;flex-wrap:wrap;gap:.1rem .9rem;margin-top:.3rem}
.legend i{display:inline-block;width:.75em;height:.75em;border-radius:3px;background:currentColor;margin-right:.35em}
.legend span{color:var(--soft)}.legend .bad-word{color:var(--bad)}
.samples{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,28rem),1fr));margin:.8rem 0}
details{margin:.5rem 0}summary{cursor:pointer;font-weight:600}
details details summary,.config summary{font-weight:400}
.tag{display:inline-block;border:1px solid var(--rule);border-radius:99px;padding:0 .6em;margin:0 .3em .3em 0;
font-size:.8rem;color:var(--soft);max-width:100%;overflow-wrap:anywhere}
.best{color:var(--good);border-color:currentColor}.worst{color:var(--poor);border-color:currentColor}
.what{font-size:.75rem;text-transform:uppercase;letter-spacing:.05em;color:var(--soft);margin:.6rem 0 .15rem}
pre{margin:0;padding:.5rem .7rem;background:var(--back);border:1px solid var(--rule);border-radius:6px;max-height:22rem;
overflow:auto;white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;
font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.code{color:var(--bad);border:1px dotted;border-radius:3px;padding:0 .15em;font-size:.85em}
table{border-collapse:collapse;width:100%}td{padding:.25rem .8rem .25rem 0;vertical-align:top;overflow-wrap:anywhere;
border-bottom:1px solid var(--rule)}td:first-child{color:var(--soft);white-space:nowrap;width:1%}
ul{margin:.3rem 0;padding-left:1.2rem}
@media print{body{background:#fff}.card{break-inside:avoid}pre{max-height:none}}
"""
