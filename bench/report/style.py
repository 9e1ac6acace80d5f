"""The style sheet of a report page: calm, readable, light or dark as the reader's system is.

One column of reading width, drawings in two; everything prints on white. No font is fetched.
"""

from collections.abc import Mapping

from baton.bench.report.palette import DARK, LIGHT

_LIGHT_PAGE = {"--paper": "#ffffff", "--page": "#f5f7f9", "--good": "#1e7a4c", "--alarm": "#b3261e"}
_DARK_PAGE = {"--paper": "#191e26", "--page": "#11151b", "--good": "#6cc799", "--alarm": "#b53128"}


def _variables(*sets: Mapping[str, str]) -> str:
    return "".join(f"{name}:{colour};" for colours in sets for name, colour in colours.items())


_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
 font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
 font-variant-numeric:tabular-nums}
main{max-width:72rem;margin:0 auto;padding:2.5rem 1.5rem 4rem}
h1{font-size:1.9rem;line-height:1.2;font-weight:650;letter-spacing:-.015em;margin:.2rem 0 .5rem;
 overflow-wrap:anywhere}
h2{font-size:1.2rem;font-weight:640;letter-spacing:-.005em;margin:3rem 0 .9rem;
 overflow-wrap:anywhere}
h3{font-size:.95rem;font-weight:620;margin:0 0 .35rem;overflow-wrap:anywhere}
p{margin:.3rem 0}
a{color:var(--c0)}
.eyebrow{text-transform:uppercase;letter-spacing:.09em;font-size:.74rem;font-weight:600;
 color:var(--muted);margin:0}
.muted,.caption{color:var(--muted)}
.caption{font-size:.85rem;margin:.45rem 0 0}
.invalid{background:var(--alarm);color:#fff;border-radius:12px;padding:1.15rem 1.4rem;
 margin:1.6rem 0 0}
.invalid strong{display:block;font-size:1.55rem;line-height:1.25;letter-spacing:.03em}
.invalid ul{margin:.7rem 0 0;padding-left:1.15rem}
.invalid li{margin:.2rem 0;overflow-wrap:anywhere}
.subject{margin:1.9rem 0 .7rem;color:var(--muted);overflow-wrap:anywhere}
.tiles{display:grid;gap:.8rem;grid-template-columns:repeat(auto-fill,minmax(14.5rem,1fr))}
.tile,.card,details.card{background:var(--paper);border:1px solid var(--grid);border-radius:12px}
.tile{padding:.95rem 1.1rem 1rem}
.tile .name{font-size:.85rem;color:var(--muted);margin:0;overflow-wrap:anywhere}
.tile .value{font-size:2rem;line-height:1.2;font-weight:630;letter-spacing:-.02em;margin:.1rem 0}
.tile .unit{font-size:.95rem;font-weight:450;letter-spacing:0;color:var(--muted);margin-left:.3rem}
.tile .note{font-size:.82rem;color:var(--muted);margin:0;overflow-wrap:anywhere}
.holds{color:var(--good)}.missed{color:var(--serious)}
.tile .note b{font-weight:620}
.unusable .tile .note b{display:none}
.unusable .tile .unit{display:inline-block;text-decoration:none}
.unusable .tile .value{color:var(--muted);text-decoration:line-through;
 text-decoration-thickness:2px;text-decoration-color:var(--serious)}
nav{margin:1.6rem 0 0;font-size:.9rem;display:flex;flex-wrap:wrap;gap:.25rem 1.1rem}
nav a{text-decoration:none}nav a:hover{text-decoration:underline}
.drawings{display:grid;gap:1rem;scroll-margin-top:1rem;grid-template-columns:repeat(auto-fit,minmax(min(27rem,100%),1fr));
 margin-top:1.6rem}
figure.card{margin:0;padding:1rem 1.1rem 1.1rem;min-width:0}
figure.wide{grid-column:1/-1}
figure h3{margin:0}
figure .caption{margin:.05rem 0 .6rem}
svg{display:block;width:100%;height:auto}
svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.card{padding:1.1rem 1.25rem;margin-top:1rem}
details.card{padding:0}
details.card>summary{cursor:pointer;padding:.85rem 1.25rem;font-weight:620;overflow-wrap:anywhere}
details.card>.inside{padding:.2rem 1.25rem 1.25rem}
.inside>*+*{margin-top:1.6rem}
.columns{columns:2 22rem;column-gap:2.6rem}
.columns>.block{break-inside:avoid;padding-bottom:1.5rem}
.columns>.block:last-child{padding-bottom:0}
.lines{margin:0;padding-left:1.15rem}
.lines li{overflow-wrap:anywhere}
.notes{margin-top:1.2rem;color:var(--muted);font-size:.9rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem}
th{text-align:left;font-weight:550;color:var(--muted);border-bottom:1px solid var(--grid);
 padding:.3rem .9rem .3rem 0;white-space:nowrap;vertical-align:bottom}
td{border-bottom:1px solid var(--grid);padding:.32rem .9rem .32rem 0;vertical-align:top}
tr:last-child td{border-bottom:0}
td:first-child{white-space:nowrap}
.numbers td:not(:first-child),.numbers th:not(:first-child){text-align:right;white-space:nowrap}
.numbers td:last-child,.numbers th:last-child{padding-right:0}
.dense{font-size:.8rem}.dense th,.dense td{padding-right:.5rem}
.dense td:first-child{white-space:normal;overflow-wrap:anywhere;min-width:6rem}
.pairs td:first-child{color:var(--muted);width:32%;white-space:normal;overflow-wrap:anywhere}
.pairs td,.words td{overflow-wrap:anywhere}
.words td:not(:first-child){min-width:4rem}
.words td:last-child{min-width:14rem}
.flag{color:var(--serious);font-weight:620}
footer{margin-top:3rem;color:var(--muted);font-size:.85rem}
@media (max-width:52rem){main{padding:1.4rem 1rem 3rem}
 h1{font-size:1.5rem}}
@page{margin:14mm}
@media print{
 html{font-size:11.5px}
 body{background:#fff;font-size:.85rem}
 main{max-width:none;padding:0}
 nav{display:none}
 h2{margin-top:1.4rem;break-after:avoid}
 .tile,figure,tr,.invalid{break-inside:avoid}
 h3{break-after:avoid}
 .scroll{overflow:visible}
 .columns{columns:2 16rem}
 .columns>.block{break-inside:auto}
 .drawings{grid-template-columns:1fr 1fr}
 .tiles{grid-template-columns:repeat(4,1fr)}
 .tile .value{font-size:1.5rem}
 details.card{break-inside:auto}
 details::details-content{content-visibility:visible;block-size:auto;display:block}
 .invalid,.invalid *{print-color-adjust:exact;-webkit-print-color-adjust:exact}
}
"""


def style_sheet() -> str:
    light, dark = _variables(LIGHT, _LIGHT_PAGE), _variables(DARK, _DARK_PAGE)
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}{_RULES}"
    )
