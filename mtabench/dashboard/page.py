"""The page: HTML of ours, without a word from a results file; our scripts fill it from the data."""

from __future__ import annotations

from mtabench.dashboard.data import Json
from mtabench.pages.page import build_page

BODY = """\
<p id="verdict" class="verdict"></p>
<p id="scope" class="quiet"></p>
<div class="columns">
<div class="news">
<section id="slower" aria-labelledby="slower-title">
<h2 id="slower-title">Slower</h2>
<div id="slower-list"></div>
</section>
<section id="failing" aria-labelledby="failing-title" hidden>
<h2 id="failing-title">Failing now</h2>
<div id="failing-list"></div>
</section>
</div>
<aside id="chosen" aria-labelledby="chosen-title">
<h2 id="chosen-title" tabindex="-1" aria-live="polite"></h2>
<p id="chosen-facts" class="quiet"></p>
<p id="chosen-now"></p>
<div id="chosen-chart" class="chart"></div>
<ul id="chosen-changes"></ul>
<details id="chosen-runs"><summary></summary><div></div></details>
</aside>
<div class="rest">
<section id="faster" aria-labelledby="faster-title">
<h2 id="faster-title">Faster</h2>
<div id="faster-list"></div>
</section>
<section id="cells" aria-labelledby="cells-title">
<h2 id="cells-title">All cells</h2>
<div id="cells-table"></div>
</section>
</div>
</div>
<section id="about" aria-labelledby="about-title">
<h2 id="about-title">How to read this</h2>
<p>A cell is one implementation at one shape on one device, timed in one way. Its history is ordered by the time at
which runs started. Times are medians; bands and ± are 95&nbsp;% intervals of the median within a run, and do not hold
what differs from run to run.</p>
<dl id="rules"></dl>
<p>A change lies between the last run before it and the first after it. Any commit between the two may be its cause,
and so may the machine: where versions differ, the change says so. No commit explains a change between two runs of one
commit, nor one that plain attention by other projects shares: those are folded below the others, and in no count of
what got slower or faster. Intervals of time that were not measured cannot be dated more closely.</p>
<div id="broken"></div>
<p id="made" class="quiet"></p>
<p class="no-print">For other tools: <a href="data.json">data.json</a>, <a href="feed.json">feed.json</a>,
<a href="badge.json">badge.json</a>, <a href="badge.svg">badge.svg</a>.</p>
</section>
"""


def page(data: Json) -> str:
    """The page of a dashboard's data."""
    scripts = ("table.js", "history-chart.js", "dashboard-parts.js", "dashboard-news.js", "dashboard.js")
    return build_page(data["title"], BODY, data, scripts, styles=("dashboard.css",))
