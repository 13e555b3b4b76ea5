"""What a person would see at once on a page in a browser: cut texts, pale texts, and names on one another in charts.

And the way to a control with the Tab key alone.
"""


def looks(*names):
    """Each page narrow and wide, once light and once dark, and the next page the other way round."""
    schemes = ("light", "dark")
    return [
        (name, width, schemes[(number + wide) % 2])
        for number, name in enumerate(names)
        for wide, width in enumerate((390, 1280))
    ]


FAULTS = """() => {
  const faults = [];
  const say = (what, node) => faults.push(`${what}: ${node.textContent.trim().slice(0, 50)}`);
  const seen = (node) => node.checkVisibility({ visibilityProperty: true }) && !node.closest("#tooltip, noscript");

  const parts = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const brightness = (colour) => {
    const [r, g, b] = parts(colour).map((one) => one / 255)
      .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [brightness(one), brightness(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const paperOf = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const { backgroundColor } = getComputedStyle(at);
      if (parts(backgroundColor)[3] !== 0) return backgroundColor;
    }
    return "rgb(255, 255, 255)";
  };

  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !seen(node) || node.matches("script, style, option, summary *")) continue;
    const { left, right, width } = node.getBoundingClientRect();
    if (width <= 1) continue; // for those who hear the page
    if ((left < -1 || right > innerWidth + 1) && !node.closest("pre")) say("cut off by the window", node);
    const style = getComputedStyle(node);
    const inChart = node instanceof SVGElement;
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.6 && style.fontWeight >= 600);
    const ratio = contrast(inChart ? style.fill : style.color, paperOf(node));
    if (ratio < (large ? 3 : 4.5)) say(`contrast ${ratio.toFixed(1)}`, node);
  }
  if (document.documentElement.scrollWidth > innerWidth) faults.push("the page scrolls sideways");
  for (const box of document.querySelectorAll(".table-scroll")) {
    if (seen(box) && box.scrollWidth > box.clientWidth + 1) say("a table is cut off", box);
  }
  for (const svg of document.querySelectorAll(".chart svg")) {
    const whole = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].filter((text) => text.textContent.trim() && seen(text))
      .map((text) => [text, text.getBoundingClientRect()]);
    for (const [text, box] of texts) {
      const cut = box.left < whole.left - 1 || box.right > whole.right + 1 || box.top < whole.top - 1;
      if (cut) say("cut off in a chart", text);
    }
    texts.forEach(([text, a], i) => texts.slice(i + 1).forEach(([other, b]) => {
      const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (width > 1 && height > 3) say(`"${other.textContent}" lies on another`, text);
    }));
  }
  return faults;
}"""


def page_faults(page):
    """The faults of what a page shows now, each as a sentence."""
    return page.evaluate(FAULTS)


def tab_to(page, selector):
    """Press Tab until what the selector names has the focus, and a visible outline."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
            return
    raise AssertionError(f"no way to {selector} with the Tab key")
