"""Write the page of error messages: each text of the sources, and the page that explains it."""

import ast
import json
import re
from collections import defaultdict
from pathlib import Path

# The page that explains the errors of a folder, the most specific folder first.
PAGES = {
    "mlstate/integrations/lightning": "run_state",
    "mlstate/integrations/mlx": "mlx_caches",
    "mlstate/integrations/transformers/_caches": "transformers_caches",
    "mlstate/integrations/transformers": "run_state",
    "mlstate/integrations/torch/_activation": "activation",
    "mlstate/integrations/torch/_checkpoint": "training",
    "mlstate/integrations/torch/_collectives": "groups",
    "mlstate/integrations/torch/_gradients": "gradients",
    "mlstate/integrations/torch": "state",
    "mlstate/activation": "activation",
    "mlstate/checkpoint/_huggingface": "huggingface",
    "mlstate/checkpoint/_folder/_remote": "object_stores",
    "mlstate/checkpoint/_tiers": "tiers",
    "mlstate/checkpoint/_files": "files",
    "mlstate/checkpoint/_load": "checkpoint_load",
    "mlstate/checkpoint/_manager": "checkpoint_steps",
    "mlstate/checkpoint/_sources": "checkpoint_load",
    "mlstate/checkpoint/_steps": "checkpoint_steps",
    "mlstate/checkpoint": "checkpoints",
    "mlstate/cli": "commands",
    "mlstate/collectives": "groups",
    "mlstate/coreai": "coreai",
    "mlstate/coreml": "coreml",
    "mlstate/distributed": "distributed",
    "mlstate/follow": "follow",
    "mlstate/fsdp": "gradients",
    "mlstate/kv": "kv",
    "mlstate/plot": "activation",
    "mlstate/prompts": "prompts",
    "mlstate/testing": "groups",
    "mlstate": "state",
    "csrc/core/activation": "activation",
    "csrc/core/planning": "activation",
    "csrc/core/checkpoint/read": "checkpoint_verify",
    "csrc/core/checkpoint": "checkpoints",
    "csrc/core/collectives": "groups",
    "csrc/core/follow": "follow",
    "csrc/core/kv": "kv",
    "csrc/core/prompts": "prompts",
    "csrc/core/safetensors": "files",
    "csrc/core/sharding": "checkpoint_ranks",
    "csrc/python/activation": "activation",
    "csrc/python/checkpoint": "checkpoints",
    "csrc/python/collectives": "groups",
    "csrc/python/follow": "follow",
    "csrc/python/kv": "kv",
    "csrc/python/prompts": "prompts",
    "csrc": "state",
}
HEAD = """\
# Error messages

The messages of exceptions and warnings, and the texts of damage that `verify` reports, with the
page that explains the subject of each. `…` stands for a name, a number or a path. Search this page,
or the site, for the first words of a message.
"""
TEXT_IN_C = r'((?:"(?:[^"\\\n]|\\.)*"\s*(?:PRI\w+\s*)?)+)'
# A call of C that raises or reports damage, and the text that follows its status and class, or the
# two texts of a condition. Or a text in a variable.
RAISES_IN_C = re.compile(
    r"\b(?:(?:mls_fail\w*|MLSPY_FAIL|MLSPY_REFUSE|PyErr_Format|PyErr_SetString|add_problem"
    rf'|mlspy_\w*(?:fail|raise|error)\w*)\s*\([^"();]*|(?:text|message)(?:\[\])? = )'
    rf"{TEXT_IN_C}(?::\s*{TEXT_IN_C})?"
)
TEXT_NAMES = {"text", "texts", "message", "reason", "problem"}  # of variables of Python
CONVERSION = re.compile(r"%[-+0-9.*]*(?:hh?|ll?|z|j|t)?[a-zA-Z]")


def page_of(path):
    """Return the page that explains the errors of a file."""
    folder = next(f for f in PAGES if path.as_posix().startswith(f"{f}/"))
    return PAGES[folder]


def text_of(node):
    """Return the literal text of an expression, with … for what is inserted."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "…"


def python_messages(source):
    """Yield the texts that a Python source raises, warns of or reports as damage."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in TEXT_NAMES:
            yield text_of(node.value)
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if isinstance(node, ast.Raise) or name.endswith(("Error", "warn")):
            yield from (text_of(argument) for argument in call.args)


def c_messages(source):
    """Yield the texts that a C source raises or reports as damage."""
    for call in RAISES_IN_C.finditer(source):
        for literals in filter(None, call.groups()):
            text = re.sub(r'%[-0-9]*"\s*PRI\w+\s*("|$)', r"…\1", literals).replace('…"', "…")
            parts = re.findall(r'"((?:[^"\\]|\\.)*)(?:"|$)', text)
            yield CONVERSION.sub("…", "".join(parts).replace('\\"', '"'))


def messages(root):
    """Return the pages, and for each the sorted messages of its sources."""
    texts = defaultdict(set)
    for folder, pattern, extract in (
        ("mlstate", "*.py", python_messages),
        ("csrc", "*.c", c_messages),
    ):
        for path in sorted((root / folder).rglob(pattern)):
            page = page_of(path.relative_to(root))
            for text in extract(path.read_text(encoding="utf-8")):
                text = re.sub(r"\s+", " ", re.sub("…+", "…", text)).strip()
                if len(re.findall("[a-z]{2,}", text)) >= 3:  # a sentence, not a name
                    texts[page].add(text)
    return texts


def write_error_index(listed, target: Path):
    """Write the page of `messages`, grouped by the pages that explain the errors."""
    lines = [HEAD]
    for page, texts in sorted(listed.items()):
        source = (target.parents[1] / f"{page}.md").read_text(encoding="utf-8")
        title = source[source.index("# ") + 2 :].partition("\n")[0]
        lines += [f"## {title}", "", f"See [{title}](../{page}.md).", ""]
        lines += [f"- `` {text} ``" for text in sorted(texts, key=lambda t: t.lstrip("… ").lower())]
        lines.append("")
    target.write_text("\n".join(lines), encoding="utf-8")


def write_search_scorer(listed, source: Path, target: Path):
    """Write the scorer of the search, with the texts of `messages`."""
    texts = sorted({text.lower() for texts in listed.values() for text in texts})
    scorer = f"const MESSAGES = {json.dumps(texts, ensure_ascii=False)};\n"
    target.write_text(scorer + source.read_text(encoding="utf-8"), encoding="utf-8")
