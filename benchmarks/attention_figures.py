"""The figures and tables of docs/attention_size.md, from the stored results.

``python benchmarks/attention_figures.py`` prints the tables; ``--write`` puts them into the page,
between the markers, and writes the figures to docs/figures/, in light and in dark colours. Results
are stored with ``python benchmarks/bench_attention.py --store``.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import stored
from summary import markdown

from mlstate.plot._figure import AGAIN, AWAY, BUDGET, USED, new_figure

PAGE = Path(__file__).resolve().parent.parent / "docs" / "attention_size.md"
FIGURES = PAGE.parent / "figures"
INKS = {"light": "#1a202c", "dark": "#e2e8f0"}
WAYS = (
    ("NumPy: all positions", "all positions", USED),
    ("NumPy: mask", "mask", AGAIN),
    ("NumPy: window only", "window only", "#38a169"),
    ("NumPy: window and 4 sinks", "window and 4 sinks", AWAY),
)

Table = dict[str, Any]


def find_tables(documents: list[stored.Document]) -> tuple[stored.Document, list[Table]]:
    """Return the newest stored document of the benchmark, and its tables."""
    matching = [d for d in documents if "attention" in d["benchmarks"]]
    if not matching:
        raise SystemExit("no results: run python benchmarks/bench_attention.py --store")
    newest = max(matching, key=lambda document: str(document["date"]))
    return newest, newest["benchmarks"]["attention"]["tables"]


def select(tables: list[Table], title: str) -> list[Table]:
    """Return the tables whose titles begin in the same way."""
    return [table for table in tables if table["title"].startswith(title)]


def layer_lengths(tables: list[Table]) -> list[tuple[int, dict[str, Table]]]:
    """Return the lengths and rows of the tables about one layer, in order."""
    length_tables = [
        (int(re.findall(r"(\d+) positions", table["title"])[0]), table)
        for table in select(tables, "attention of 1 token")
    ]
    rows = [
        (length, {row["name"]: row for row in table["rows"]}) for length, table in length_tables
    ]
    return sorted(rows, key=lambda pair: pair[0])


def percent(text: str) -> float:
    """Return the number of a text such as `97.4 %`."""
    return float(text.split()[0])


# ---- tables ----


def time_table(tables: list[Table]) -> str:
    """The time of one token's attention in a layer, by length."""
    lengths = layer_lengths(tables)
    head = ["µs", *(f"{length:,} positions" for length, _ in lengths)]
    cells = [
        [name, *(f"{rows[name]['median']:,.0f}" for _, rows in lengths)] for name in lengths[0][1]
    ]
    (model,) = select(tables, "a step of the demo's model")
    steps = [[row["name"], f"{row['median']:,.0f}"] for row in model["rows"]]
    return markdown(head, cells) + "\n" + markdown([model["title"], "µs"], steps)


def effect_table(tables: list[Table]) -> str:
    """Log-likelihood and agreement by attention size."""
    (table,) = select(tables, "attention size")
    head = ["attention size", "bits for a character", "same next character"]
    head += ["characters written alike", "whole text alike"]
    keys = ("name", "mean", "next agrees", "same start", "all same")
    return markdown(head, [[str(row[key]) for key in keys] for row in table["rows"]])


def rolling_table(tables: list[Table]) -> str:
    """Log-likelihood beyond the model's context."""
    (table,) = select(tables, "characters ")
    cells = [[row["name"], row["mean"]] for row in table["rows"]]
    return markdown(["cache", "bits for a character"], cells)


TABLES = {"time": time_table, "effect": effect_table, "rolling": rolling_table}


def filled_in(page: str, tables: list[Table]) -> str:
    """Put the tables between the page's markers."""
    for name, table in TABLES.items():
        before, begin, rest = page.partition(f"<!-- {name}: begin -->\n")
        _, end, after = rest.partition(f"<!-- {name}: end -->")
        assert begin and end, f"the page has no markers of {name}"
        page = before + begin + table(tables) + end + after
    return page


# ---- figures ----


def draw_time(tables: list[Table]) -> Any:
    """Time over the length of the cache, for each way."""
    lengths = layer_lengths(tables)
    figure = new_figure(7.2, 3.8)
    axes = figure.add_subplot()
    for name, label, colour in WAYS:
        medians = [rows[name]["median"] / 1e3 for _, rows in lengths]
        places = [length for length, _ in lengths]
        axes.plot(places, medians, color=colour, marker="o", linewidth=1.8, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([length for length, _ in lengths], [f"{length:,}" for length, _ in lengths])
    axes.set_xlabel("positions of the cache")
    axes.set_ylabel("ms for one token and layer")
    axes.set_title("A mask saves no time, a window does", loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def draw_effect(tables: list[Table]) -> Any:
    """Bits for a character, and agreement, over the attention size."""
    (table,) = select(tables, "attention size")
    full = next(row for row in table["rows"] if row["name"] == "full")
    numbered = [row for row in table["rows"] if row["name"].isdigit()]
    sizes = [int(row["name"]) for row in numbered]
    figure = new_figure(8.6, 3.6)
    left, right = figure.subplots(1, 2)
    left.plot(sizes, [float(r["mean"]) for r in numbered], color=USED, marker="o", linewidth=1.8)
    left.axhline(float(full["mean"]), color=BUDGET, linestyle="--")
    left.text(sizes[0], float(full["mean"]), "full attention", color=BUDGET, va="bottom", ha="left")
    left.set_title("Bits for a character of the real text", loc="left", fontsize="medium")
    right.plot(sizes, [percent(r["next agrees"]) for r in numbered], color=USED, marker="o")
    right.set_title("Same next character, %", loc="left", fontsize="medium")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes], fontsize="small")
        axes.minorticks_off()
        axes.set_xlabel("attention size")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def write_figures(tables: list[Table]) -> None:
    """Write each figure in both colours; equal results give equal files."""
    import matplotlib as mpl

    FIGURES.mkdir(exist_ok=True)
    for shade, ink in INKS.items():
        inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        style = dict.fromkeys(inked, ink) | {
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "savefig.facecolor": "none",
            "svg.fonttype": "none",
            "svg.hashsalt": "mlstate",
            "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
        }
        with mpl.rc_context(style):
            for name, draw in (("time", draw_time), ("effect", draw_effect)):
                path = FIGURES / f"attention_{name}_{shade}.svg"
                draw(tables).savefig(path, metadata={"Date": None})
                text = path.read_text(encoding="utf-8")
                path.write_text(re.sub(r" +\n", "\n", text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the page and its figures")
    options = parser.parse_args()
    _, tables = find_tables(stored.stored_files())
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(filled_in(page, tables), encoding="utf-8")
        write_figures(tables)
    else:
        print("\n".join(table(tables) for table in TABLES.values()))


if __name__ == "__main__":
    main()
