"""Fathom runs from its checkout and is not installed: its folder kernels/ would hide PyPI's package of that name."""

raise SystemExit("Fathom is not installed: run its scripts from the checkout, after pip install -r requirements.txt")
