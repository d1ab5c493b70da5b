"""Results of benchmarks as files: benchmarks/results/PROCESSOR/DATE.json.

One file has all benchmarks of one day and processor, by name. Storing a benchmark again replaces
its tables by title; the tables of other parts and benchmarks are kept. Each table includes the
command that made it.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
CPU_INFO = Path("/proc/cpuinfo")
SYSCTL = "machdep.cpu."

Document = dict[str, Any]


def slug(text: str) -> str:
    """Turn a name into lower-case words with hyphens."""
    lower_text = re.sub(r"\((r|tm|c)\)", "", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", lower_text).strip("-") or "unknown"


def parse_cpu_info(text: str) -> dict[str, str]:
    """Return name, family and model of the first processor in /proc/cpuinfo's text."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip().lower(), value.strip())
    if "model name" in fields:
        facts = {"name": fields["model name"]}
        names = {"family": "cpu family", "model": "model"}
    else:  # arm64 has numbers only
        facts = {"name": "arm64"}
        names = {"implementer": "cpu implementer", "part": "cpu part"}
        if "cpu part" not in fields:
            return {}
    return facts | {name: fields[key] for name, key in names.items() if fields.get(key)}


def ask_sysctl(name: str) -> str:
    """Return a value of sysctl on macOS, empty if there is none of this name."""
    command = ["sysctl", "-n", SYSCTL + name]
    output = subprocess.run(command, capture_output=True, text=True, check=False)
    return output.stdout.strip()


def processor() -> dict[str, str]:
    """Return the processor's name, what else identifies it, and the name of its folder."""
    facts: dict[str, str] = {}
    if sys.platform == "darwin":
        facts = {"name": ask_sysctl("brand_string")}
        facts |= {n: v for n in ("family", "model") if (v := ask_sysctl(n))}
    elif CPU_INFO.exists():
        facts = parse_cpu_info(CPU_INFO.read_text(encoding="utf-8", errors="replace"))
    if not facts.get("name"):
        facts = {"name": platform.processor() or platform.machine() or "unknown"}
    return facts | {"slug": slug_of(facts)}


def describe() -> str:
    """Return the processor's name with what else identifies it: `AMD EPYC (family 25 model 1)`."""
    facts = processor()
    more = [f"{key} {value}" for key, value in facts.items() if key not in ("name", "slug")]
    return facts["name"] + (f" ({' '.join(more)})" if more else "")


def slug_of(facts: dict[str, str]) -> str:
    """Return the folder's name: the processor's name alone is ambiguous on virtual machines."""
    parts = [facts["name"]]
    for key in ("family", "model", "implementer", "part"):
        if key in facts:
            parts.append(f"{key} {facts[key]}")
    return slug(" ".join(parts))


def store(
    benchmark: str, run: Document, date: str, where: dict[str, str], root: Path = RESULTS
) -> Path:
    """Store one benchmark's run in the day's file, and return the file's path."""
    path = root / where["slug"] / f"{date}.json"
    document: Document = {"processor": where, "date": date, "benchmarks": {}}
    if path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
    before = document["benchmarks"].get(benchmark, {"tables": []})
    titles = {table["title"] for table in run["tables"]}
    other_tables = [table for table in before["tables"] if table["title"] not in titles]
    tables = [table | {"command": run["command"]} for table in run["tables"]]
    document["benchmarks"][benchmark] = run | {"tables": other_tables + tables}
    document["benchmarks"] = dict(sorted(document["benchmarks"].items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(compact(document) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def compact(document: Document) -> str:
    """Return JSON with one line for each row, which keeps changes readable."""
    rows: list[str] = []

    def replace(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.4g}")
        if isinstance(value, list):
            return [replace(item) for item in value]
        if not isinstance(value, dict):
            return value
        replaced = {key: replace(item) for key, item in value.items()}
        if "name" in replaced and any(isinstance(v, float) for v in replaced.values()):
            rows.append(json.dumps(replaced))
            return f"@row {len(rows) - 1}@"
        return replaced

    text = json.dumps(replace(document), indent=1)
    return re.sub(r'"@row (\d+)@"', lambda match: rows[int(match[1])], text)


def stored_files(root: Path = RESULTS) -> list[Document]:
    """Read all stored results, by processor and date."""
    return [json.loads(p.read_text(encoding="utf-8")) for p in sorted(root.glob("*/*.json"))]
