// What is new: the verdict, the changes by commit, and what fails. `cellButton` makes the button that chooses a cell.
"use strict";

function showNews(cellButton) {
  const { data, revisions, dateOf, timeOf, changeMark, evidenceOf, twoLines, element, EVIDENCE } = dashboard;
  const { cells, runs, changes, events, failures } = data;

  function showVerdict() {
    const { slower, maybe_slower: maybeSlower, faster, maybe_faster: maybeFaster, broken, unexplained: byMachine, compared } = data.counts;
    const counts = [
      [slower, "got slower", "bad"],
      [maybeSlower, "maybe slower", "warn"],
      [broken, broken === 1 ? "fails that did not before" : "fail that did not before", "bad"],
      [faster, "got faster", "good"],
      [maybeFaster, "maybe faster", "good"],
      [byMachine, "changed with no commit to explain it", "quiet"],
    ];
    const parts = counts
      .filter(([number]) => number)
      .map(([number, words, className]) => make("span", { text: `${plural(number, "cell")} ${words}`, className }));
    const calm = compared ? { text: "Nothing got slower", className: "good" } : { text: "Nothing could be compared", className: "quiet" };
    if (!slower && !maybeSlower) parts.unshift(make("span", calm));
    const days = make("span", { text: ` in the last ${plural(data.rules.days, "day")} of runs`, className: "quiet" });
    element("verdict").append(...parts.flatMap((part, i) => (i ? [", ", part] : [part])), days);
  }

  function showScope() {
    const last = runs.run_id.length - 1;
    const shas = new Set(runs.git_sha.filter(Boolean));
    const devices = [...new Set(data.environments.map(({ device }) => device))];
    element("scope").append(
      `${plural(cells.id.length, "cell")}, ${plural(last + 1, "run")} of ${plural(shas.size, "revision")}, on `,
      devices.length > 3 ? `${devices.length} devices` : devices.join(", "),
      `, ${timeOf(0)} to ${timeOf(last)}. Last revision: `,
      revisions(null, last),
      runs.git_dirty[last] ? " with uncommitted changes." : ".",
    );
  }

  function showEvents(place, slower) {
    const direction = slower ? "slower" : "faster";
    const found = events.filter((event) => event.slower === slower);
    const explained = found.filter((event) => !event.unexplained);
    const others = found.filter((event) => event.unexplained);
    if (explained.length) eventTable(place, explained, `Changes to ${direction}, by commit`);
    else {
      const text = others.length ? `Nothing got ${direction} that a commit may explain.` : `No change to ${direction} was found.`;
      place.append(make("p", { text, className: "quiet" }));
    }
    if (!others.length) return;
    const title = `${plural(others.length, "change")} to ${direction}, probably the machine: no commit explains ${others[1] ? "them" : "it"}`;
    place.append(folded(title, (inside) => eventTable(inside, others, title)));
  }

  // A summary that makes what is inside when it is opened first.
  function folded(title, fill) {
    const box = make("details", {}, make("summary", { text: title }));
    const inside = box.appendChild(make("div"));
    box.addEventListener("toggle", () => {
      if (!inside.childElementCount) fill(inside);
    });
    return box;
  }

  function eventTable(place, found, caption) {
    createTable(place, {
      caption,
      noun: found.length === 1 ? "change" : "changes",
      rows: found.map((event) => ({
        event,
        change: 100 * event.change,
        when: runs.started_utc[event.bad],
        cells: event.changes.length,
      })),
      pageSize: 8,
      columns: [
        { name: "change", label: "change", kind: "number", show: ({ event }) => changeMark(membersOf(event), event.change) },
        { name: "when", label: "commits", show: ({ event }) => commits(event.good, event.bad) },
        { name: "cells", label: "cells", show: ({ event }) => describe(event) },
      ],
      detail: ({ event }) => cellList(membersOf(event)),
    });
  }

  function membersOf(event) {
    return event.changes.map((number) => changes[number]);
  }

  function commits(good, bad) {
    return twoLines(revisions(good, bad), dateOf(bad), "commits");
  }

  // Which cells, and below them what makes the change less sure than it looks.
  function describe(event) {
    const members = membersOf(event);
    const notes = Object.keys(EVIDENCE)
      .filter((kind) => kind !== "step" && members.every(({ evidence }) => evidence === kind))
      .map((kind) => EVIDENCE[kind]);
    if (!event.lasting) notes.push("undone since");
    const what = members.length === 1 ? cellButton(members[0].cell) : make("span", { text: summaryOf(members) });
    return twoLines(what, [...notes, ...event.notes].join("; "));
  }

  // "40 cells: 24 fwd triton, 16 bwd triton"
  function summaryOf(members) {
    const counts = new Map();
    for (const { cell } of members) {
      const name = `${cells.pass[cell]} ${cells.impl[cell]}`;
      counts.set(name, (counts.get(name) ?? 0) + 1);
    }
    const whole = plural(members.length, "cell");
    if (counts.size === 1) return `${whole} of ${[...counts.keys()][0]}`;
    const named = [...counts].sort((a, b) => b[1] - a[1]).map(([name, number]) => `${number} ${name}`);
    const more = named.length > 4 ? ` and ${named.length - 4} more` : "";
    return `${whole}: ${named.slice(0, 4).join(", ")}${more}`;
  }

  function cellList(members) {
    const list = make("div");
    createTable(list, {
      caption: "Cells, the largest change first",
      noun: members.length === 1 ? "cell" : "cells",
      pageSize: 10,
      rows: members.map((one) => ({
        one,
        label: cells.label[one.cell],
        change: 100 * one.change,
        before: one.before_ms,
        after: one.after_ms,
        evidence: evidenceOf(one),
      })),
      columns: [
        { name: "label", label: "cell", show: ({ one }) => cellButton(one.cell) },
        { name: "change", label: "change", kind: "number", show: ({ one }) => changeMark([one]) },
        { name: "before", label: "before", unit: "ms", kind: "number" },
        { name: "after", label: "after", unit: "ms", kind: "number" },
        { name: "evidence", label: "evidence" },
      ],
    });
    return list;
  }

  function showFailures(place) {
    const news = failures.filter(({ broken }) => broken);
    const old = failures.filter(({ broken }) => !broken);
    if (news.length) failureTable(place, news, "Worked before, or wrong");
    if (!old.length) return;
    const title = `${plural(old.length, "cell")} never had a time`;
    place.append(folded(title, (inside) => failureTable(inside, old, "Never had a time")));
  }

  function failureTable(place, members, caption) {
    createTable(place, {
      caption,
      noun: members.length === 1 ? "cell" : "cells",
      pageSize: 8,
      rows: members.map((one) => ({
        one,
        label: cells.label[one.cell],
        status: one.status,
        since: runs.started_utc[one.since],
        reason: one.reason,
      })),
      columns: [
        { name: "label", label: "cell", show: ({ one }) => cellButton(one.cell) },
        { name: "status", label: "status", show: ({ status }) => make("span", { text: status, className: "bad" }) },
        { name: "since", label: "since", show: ({ one }) => commits(one.good, one.since) },
        { name: "reason", label: "reason", show: ({ reason }) => make("div", { text: reason, className: "wrap" }) },
      ],
    });
  }

  showVerdict();
  showScope();
  showEvents(element("slower-list"), true);
  showEvents(element("faster-list"), false);
  showFailures(element("failing-list"));
  element("failing").hidden = !failures.length;
}
