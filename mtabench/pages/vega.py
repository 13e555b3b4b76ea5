"""The chart library of the pages: Vega-Lite with vega-embed, taken from the package vl-convert-python.

Chosen because its bundle is small for a page that holds everything, and because it can interpret its expressions: the
page's policy then forbids `eval`, which libraries that compile functions need.
"""

from __future__ import annotations

from functools import cache

from mtabench.errors import UsageError


@cache
def vega_script() -> str:
    """A script of 0.9 MB that sets `window.vegaEmbed` and no other name; takes seconds the first time.

    Raises UsageError if vl-convert-python is not installed.
    """
    try:
        import vl_convert
    except ImportError as error:
        raise UsageError(
            "this page needs the package vl-convert-python, which is not installed; "
            "install it with: pip install 'mtabench[report]'"
        ) from error
    return f"(function () {{\n{vl_convert.javascript_bundle('window.vegaEmbed = vegaEmbed;')}\n}})();"
