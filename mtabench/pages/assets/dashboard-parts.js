// What the parts of the dashboard share: its data, and revisions, dates and changes as they are shown.
"use strict";

const dashboard = (function () {
  const data = pageData();
  const { runs } = data;
  const SHA = /^[0-9a-f]{7,64}$/;
  const linked = /^https?:\/\//.test(data.repo_url);

  const changesOf = data.cells.id.map(() => []);
  for (const change of data.changes) changesOf[change.cell].push(change);
  const unexplained = new Set();
  for (const event of data.events) {
    if (event.unexplained) event.changes.forEach((number) => unexplained.add(data.changes[number]));
  }

  const EVIDENCE = { step: "a new level", latest: "not confirmed yet", few: "few runs", drift: "gradual" };
  const SURE = ["step", "drift"];

  function revisionName(run) {
    return runs.git_sha[run] ? runs.git_sha[run].slice(0, 12) : `run ${runs.run_id[run]}`;
  }

  function shortName(run) {
    return revisionName(run).slice(0, runs.git_sha[run] ? 7 : 16);
  }

  // The commits between two runs, or `bad`'s commit where `good` is null: a link if there is a repository and a commit.
  function revisions(good, bad) {
    const [from, to] = [good, bad].map((run) => (run === null ? "" : runs.git_sha[run]));
    const shown = good === null ? [revisionName(bad)] : [`${shortName(good)}..`, make("wbr"), shortName(bad)];
    if (!linked || !SHA.test(to)) return make("span", { className: "mono" }, ...shown);
    const path = SHA.test(from) && from !== to ? `compare/${from}...${to}` : `commit/${to}`;
    const attributes = { href: `${data.repo_url}/${path}`, rel: "noopener noreferrer" };
    return make("a", { className: "mono", attributes }, ...shown);
  }

  // "21 Nov 2026"
  function dateOf(run) {
    const started = new Date(runs.started_utc[run]);
    return started.toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric", timeZone: "UTC" });
  }

  // "2026-11-21 08:45 UTC"
  function timeOf(run) {
    return `${runs.started_utc[run].slice(0, 10)} ${runs.started_utc[run].slice(11, 16)} UTC`;
  }

  // The colour of changes that belong together: what is probably the machine has none, what is not sure is no alarm.
  function colourOf(members) {
    if (unexplained.has(members[0])) return "quiet";
    if (members[0].change < 0) return "good";
    return members.some(({ evidence }) => SURE.includes(evidence)) ? "bad" : "warn";
  }

  function changeMark(members, change = members[0].change) {
    return make("span", { text: formatChange(change), className: colourOf(members) });
  }

  function evidenceOf(one) {
    const undone = one.lasting ? "" : "; undone since";
    return EVIDENCE[one.evidence] + undone + (unexplained.has(one) ? "; no commit explains it" : "");
  }

  function twoLines(first, second, className = "") {
    return make("div", { className: `lines ${className}` }, first, make("span", { text: second, className: "quiet" }));
  }

  return {
    data, changesOf, unexplained, EVIDENCE, revisionName, revisions, dateOf, timeOf, changeMark, colourOf, evidenceOf, twoLines,
    element: (id) => document.getElementById(id),
  };
})();
