"""Pages of HTML that stand alone: no script, nothing from a network, and text from outside is
shown, never obeyed."""

import html

# Browsers may neither load nor run anything, whatever a page's texts say.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --page: #fff; --faint: #667; --line: #d5d8dd;
  --box: #f5f6f8;
  --target: #c9ecd0; --target-line: #2c8a44; --warning: #a33; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --page: #15181c; --faint: #99a;
  --line: #3a3f47;
  --box: #1e2228; --target: #1c4a2a; --target-line: #5fc27a; --warning: #f88; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 76rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem;
  margin: 1.6rem 0 .5rem; }
h3 { font-size: .95rem; margin: 1rem 0 .3rem; overflow-wrap: anywhere; }
pre { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  unicode-bidi: isolate;
  background: var(--box); border: 1px solid var(--line); border-radius: 4px; padding: .6rem .8rem;
  margin: 0; }
.faint { color: var(--faint); } .warning { color: var(--warning); }
"""
# Control characters are shown as their pictures: the escape character as U+241B. Tabs and line
# feeds stay.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}


def escaped(text: object) -> str:
    """Returns a text as HTML that shows it: "<b>" is "&lt;b&gt;"; bytes that are no text are
    "\\udcff"."""
    readable = str(text).encode(errors="backslashreplace").decode()
    return html.escape(readable.translate(_PICTURES))


def page(title: str, body: str, style: str = "", seconds_to_reload: int | None = None) -> str:
    """Returns a page. `body` and `style` are HTML and CSS; `title` is text."""
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
    ]
    if seconds_to_reload is not None:
        lines.append(f'<meta http-equiv="refresh" content="{seconds_to_reload}">')
    lines += [
        f"<title>{escaped(title)}</title><style>{STYLE}{style}</style></head>",
        f"<body><h1>{escaped(title)}</h1>",
        body,
        "</body></html>\n",
    ]
    return "\n".join(lines)
