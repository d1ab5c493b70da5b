"""Sphinx settings of the documentation; `make docs` builds it.

Pages are Markdown (MyST).  The reference, docs/api/, is written here at each build from
the `__all__` of every public module, so a new public name needs no entry elsewhere.  The folder
also has copies of the notebooks, and the index of error messages.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import shutil
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from error_index import messages, write_error_index, write_search_scorer  # noqa: E402

import mlstate  # noqa: E402
from mlstate._common.set_module import set_module  # noqa: E402
from mlstate.cli.command_line import _COMMANDS as COMMANDS  # noqa: E402

project = "mlstate"
copyright = "the mlstate authors, Apache-2.0"
version = release = mlstate.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_nb",
    "sphinx_copybutton",
]
exclude_patterns = ["README.md"]
html_theme = "furo"
pygments_dark_style = "github-dark"
toc_object_entries_show_parents = "hide"
html_title = f"mlstate {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "api" / "search_scorer.js")
html_show_sourcelink = False
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
default_role = "py:obj"
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are stored with outputs, and a test runs them
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist"]
autodoc_typehints = "none"  # docstrings contain types and shapes
autodoc_member_order = "bysource"
numpydoc_show_class_members = False

# Programs for the shell, without a Python interface.
INTERNAL = ("mlstate.cli", "mlstate.demo")

MODULE_PAGE = """\
{name}
{line}

.. automodule:: {name}
   :no-members:

.. currentmodule:: {name}

.. list-table::
   :widths: auto

{table}

.. toctree::
   :hidden:

{pages}

{entries}
"""

INDEX_PAGE = """\
Python reference
================

.. list-table::
   :widths: auto

{table}
   * - :doc:`error_messages`
     - The errors that mlstate raises, by their texts.

.. toctree::
   :hidden:

{pages}
   error_messages
"""

NAME_PAGE = """\
{name}
{line}

.. currentmodule:: {module}

{entry}
"""

# Private base classes with the documented methods of several public classes.
SHARED_BASES = (
    "mlstate.activation._combinators",
    "mlstate.collectives._process_group",
    "mlstate.kv._state_manager",
)

ENTRY = """\
.. auto{kind}:: {name}
{options}
"""


# The module that a page is about, for names that several modules have, if not `mlstate.PAGE`.
SUBJECTS = {
    "gradients": "mlstate.fsdp",
    "mlx": "mlstate.integrations.mlx",
    "start_coreml": "mlstate.coreml",
    "start_notebooks": "mlstate.state",
    "transformers": "mlstate.integrations.transformers",
}
# Words of the glossary that have another sense elsewhere, and the pages of their own sense.
CHECKPOINTS = ("checkpoint", "format", "object_stores", "scale", "start_training", "training")
RANKS = (*CHECKPOINTS, "distributed", "gradients", "groups", "run_state", "tiers")
TERM_PAGES = {
    "anchor": "follow",
    "block": "activation",
    "capacity": ("kv", "transformers"),
    "chain": "activation",
    "delta": "follow",
    "generation": (*CHECKPOINTS, "commands", "follow"),
    "group": RANKS,
    "index": CHECKPOINTS,
    "layout": (*RANKS, "commands", "follow", "huggingface", "proof", "testing"),
    "part": RANKS,
    "plan": "activation",
    "root": ("format", "object_stores"),
    "step": (*RANKS, "commands"),
    "strategy": "activation",
    "transition": ("coreai", "coreml", "kv", "start_coreml"),
    "unit": ("gradients", "tiers"),
    "version": ("checkpoint_storage", "follow"),
}
ALIASES = {}  # from a name such as `mlstate.save` to the module that documents it


def public_modules():
    """Names of the modules that have an `__all__`, the top level last."""
    walk = pkgutil.walk_packages(mlstate.__path__, "mlstate.")
    names = [m.name for m in walk if not any(part.startswith("_") for part in m.name.split("."))]
    names = [name for name in names if not name.startswith(INTERNAL)]
    return [n for n in names if getattr(importlib.import_module(n), "__all__", None)] + ["mlstate"]


def entry(name, thing):
    """The directive that documents `thing`."""
    options = ""
    if inspect.isclass(thing):
        kind = "exception" if issubclass(thing, BaseException) else "class"
        options = "   :members:\n"
        if any(base.__module__ in SHARED_BASES for base in thing.__mro__[1:]):
            options += "   :inherited-members:\n"
        if issubclass(thing, tuple):  # omit the methods of tuple
            options += "   :exclude-members: count, index, __new__\n"
    else:
        kind = "function" if inspect.isroutine(thing) else "data"
    return ENTRY.format(kind=kind, name=name, options=options)


def write_name_page(folder, module, name):
    """Write the page of a function or class, and return the name of the file."""
    thing = getattr(module, name)
    full = f"{module.__name__}.{name}"
    same = [other for other in module.__all__ if other.lower() == name.lower()]
    # Some file systems do not distinguish `Plan` from `plan`.
    file = full + "-class" * (inspect.isclass(thing) and len(same) > 1)
    page = NAME_PAGE.format(
        name=full, line="=" * len(full), module=module.__name__, entry=entry(name, thing)
    )
    (folder / f"{file}.rst").write_text(page, encoding="utf-8")
    return file


def row(name, thing):
    """A row of a module's table: a name, and the first line of its docstring."""
    is_data = not (inspect.ismodule(thing) or inspect.isclass(thing) or inspect.isroutine(thing))
    summary = "" if is_data else (inspect.getdoc(thing) or "").partition("\n\n")[0]
    return f"   * - :py:obj:`~{name}`\n     - {' '.join(summary.split())}"


def write_reference():
    """Write docs/api: a page for each public module, and for each function and class.

    Exceptions and constants are on the page of their module.
    """
    folder = HERE / "api"
    folder.mkdir(exist_ok=True)
    described = {}
    modules = public_modules()
    # Describe a name in the most specific module that lists it.
    for module_name in sorted(modules, key=lambda name: (name == "mlstate", name)):
        module = importlib.import_module(module_name)
        table, pages, entries = [], [], []
        for name in module.__all__:
            thing = getattr(module, name)
            full = f"{module_name}.{name}"
            if inspect.ismodule(thing):
                full = thing.__name__
            elif name == "__version__":
                continue
            elif id(thing) in described:
                ALIASES[full] = full = described[id(thing)]
            else:
                described[id(thing)] = full
                is_error = inspect.isclass(thing) and issubclass(thing, BaseException)
                if is_error or not (inspect.isclass(thing) or inspect.isroutine(thing)):
                    entries.append(entry(name, thing))
                else:
                    pages.append(f"   {write_name_page(folder, module, name)}")
            table.append(row(full, thing))
        if module_name != "mlstate":
            pages += [f"   {name}" for name in modules if name.startswith(f"{module_name}.")]
        page = MODULE_PAGE.format(
            name=module_name,
            line="=" * len(module_name),
            table="\n".join(table),
            pages="\n".join(pages),
            entries="\n".join(entries),
        )
        (folder / f"{module_name}.rst").write_text(page, encoding="utf-8")
    parents = ("", "mlstate", "mlstate.integrations")
    modules = [name for name in modules[-1:] + modules[:-1] if name.rpartition(".")[0] in parents]
    page = INDEX_PAGE.format(
        table="\n".join(row(name, importlib.import_module(name)) for name in modules),
        pages="\n".join(f"   {name.removeprefix('mlstate.')} <{name}>" for name in modules),
    )
    (folder / "index.rst").write_text(page, encoding="utf-8")


def report_source_modules():
    """Undo `set_module`: Sphinx needs the files to link to sources and to keep their order."""
    for info in pkgutil.walk_packages(mlstate.__path__, "mlstate."):
        if info.name.endswith(("._core", ".__main__")) or info.name.startswith(INTERNAL):
            continue
        module = importlib.import_module(info.name)
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                thing = getattr(module, node.name)
                for each in (thing, getattr(thing, "_explained", thing)):  # or its wrapper
                    set_module(info.name)(each)


def complete_inventory(app, env):
    """Add the aliases to objects.inv; warn of a public name or a command that is missing."""
    objects = env.get_domain("py").objects
    for full, target in list(objects.items()):
        for alias, home in ALIASES.items():
            if f"{full}.".startswith(f"{home}."):
                objects[alias + full.removeprefix(home)] = target._replace(aliased=True)
    names = [f"{m}.{name}" for m in public_modules() for name in importlib.import_module(m).__all__]
    missing = {*names} - {*objects, "mlstate.__version__"}
    commands = {f"mlstate-{module.__name__.rpartition('.')[2]}" for module in COMMANDS}
    missing |= commands - env.get_domain("std").anonlabels.keys()
    for name in sorted(missing):
        logging.getLogger(__name__).warning("not in objects.inv: %s", name)


def is_link(node):
    """Whether a node is in a link or a title."""
    outer = (nodes.reference, nodes.title, addnodes.download_reference)
    while node := node.parent:
        if isinstance(node, outer):
            return True
    return False


class LinkFiles(SphinxTransform):
    """Link inline code that names a file of the repository, such as a benchmark, to that file."""

    default_priority = 800  # before Sphinx collects the files to copy

    def apply(self, **_):
        """Put a link around each literal text that is a path, or `python` and a path."""
        for literal in list(self.document.findall(nodes.literal)):
            name = re.fullmatch(r"(?:python )?(\w+/[\w./-]+\.\w+)(?: .*)?", literal.astext())
            if name and not is_link(literal) and (HERE.parent / name[1]).is_file():
                link = addnodes.download_reference(
                    "", "", reftarget=f"/../{name[1]}", refdoc=self.env.docname
                )
                literal.replace_self(link)
                link += literal


class LinkPublicNames(SphinxPostTransform):
    """Link inline code that is a public name or a command, such as `load` or `mlstate info`."""

    default_priority = 15  # after references are resolved

    def run(self, **_):
        """Put a link around each literal text, type or error that names one object, and each page.

        Short options of commands do not break after their hyphens.
        """
        for literal in list(self.document.findall(nodes.literal)):
            text = literal.astext()
            if text.startswith("--") and len(text) < 25:
                literal["classes"].append("option")
            name = re.fullmatch(r"(?:mlstate\.)?([\w.]+)(?:\(.*)?", text, re.DOTALL)
            link = not is_link(literal) and (
                self.link_to_command(text) or (name and self.link_to(name[1], text))
            )
            if link:
                literal.replace_self(link)
                link += literal
        for text in list(self.document.findall(nodes.Text)):
            if isinstance(text.parent, nodes.classifier | nodes.term):
                self.link_words(text, r"(?<![\w.])((?:mlstate[\w.]*\.)?[A-Z]\w+)")
            elif isinstance(text.parent, nodes.paragraph):
                self.link_words(text, r"(?<![\w.])(docs/\w+\.md|[A-Z]\w*[a-z][A-Z]\w+)")

    def link_words(self, text, pattern):
        """Put a link around each word that matches the pattern and names an object or a page."""
        words = re.split(pattern, text)
        for i in range(1, len(words), 2):
            page = re.fullmatch(r"docs/(\w+)\.md", words[i])
            name = words[i].removeprefix("mlstate.")
            if link := self.reference(page[1]) if page else self.link_to(name):
                link += nodes.Text(words[i])
                words[i] = link
        parts = [nodes.Text(word) if isinstance(word, str) else word for word in words]
        text.parent.replace(text, parts)

    def link_to_command(self, text):
        """Return a link to the command that a text runs, or on their page names, or None."""
        optional = "?" * (self.env.docname == "commands")
        name = re.match(rf"(?:mlstate ){optional}([a-z]+)(?= |$)", text)
        label = name and self.env.get_domain("std").anonlabels.get(f"mlstate-{name[1]}")
        return self.reference(*label) if label else None

    def reference(self, page, anchor=""):
        """Return a link to a place on a page."""
        folder = self.app.builder.get_relative_uri(self.env.docname, page)
        return nodes.reference("", "", internal=True, refuri=f"{folder}#{anchor}".rstrip("#"))

    def link_to(self, name, text=""):
        """Return a link to the object with a name, or None if it is not public or ambiguous."""
        names = self.config.public_names
        method = name.rpartition(".")[2]  # `manager.save_async` names a method too
        places = (
            names.get(text) or names.get(name) or names.get(method if "_" in method else "", ())
        )
        if len(places) > 1:  # `save` is a function or a class, `manager.save` a method
            places = {place for place in places if place[2] == ("." in name)}
        if len(places) > 1:
            near = {place for place in places if f"{place[0]}.".startswith(f"api/{self.home()}.")}
            top = self.env.get_domain("py").objects.get(f"mlstate.{name}")
            places = near or {(top.docname, top.node_id, False)} if top else near
        if len(places) != 1:
            return None
        [(page, anchor, _)] = places
        return self.reference(page, anchor)

    def home(self):
        """Return the module that the page is about."""
        page = self.env.docname.removeprefix("api/")
        if page.startswith("mlstate"):
            full = page.removesuffix("-class")
            return full if full in sys.modules else full.rpartition(".")[0]
        family = page.partition("_")[0]
        return SUBJECTS.get(page) or SUBJECTS.get(family, f"mlstate.{family}")


class LinkTerms(SphinxPostTransform):
    """Link a word of the glossary where a page first uses it."""

    default_priority = 16

    def run(self, **_):
        """Put a link around the first use of each word in a paragraph or a table."""
        page = self.env.docname
        if page == "glossary" or page.startswith("api/"):
            return
        folder = self.app.builder.get_relative_uri(page, "glossary")
        for term, (_, anchor) in self.env.get_domain("std")._terms.items():
            if page.startswith(TERM_PAGES.get(term, "")):
                word = re.compile(rf"\b{term}s?\b", re.IGNORECASE)
                self.link_first(word, f"{folder}#{anchor}")

    def link_first(self, word, target):
        """Put a link to `target` around the first text that matches `word`."""
        for text in self.document.findall(nodes.Text):
            match = word.search(text)
            inside = isinstance(text.parent, nodes.paragraph | nodes.entry)
            if match and inside and not is_link(text):
                link = nodes.reference("", match[0], internal=True, refuri=target, classes=["term"])
                before, after = nodes.Text(text[: match.start()]), nodes.Text(text[match.end() :])
                text.parent.replace(text, [before, link, after])
                return


class DescribePlots(SphinxPostTransform):
    """Describe the plots of notebooks, for readers who do not see them, by their section."""

    default_priority = 17  # after an output of each cell is selected

    def run(self, **_):
        """Set the text of each image without one; Sphinx would use the name of its file."""
        for image in self.document.findall(nodes.image):
            section = image.parent
            while not isinstance(section, nodes.section):
                section = section.parent
            image.setdefault("alt", f"Plot: {section[0].astext()}")


def collect_public_names(app, env):
    """Map each public name, with and without its modules, to the places that document it."""
    names = {}
    for full, entry in env.get_domain("py").objects.items():
        if not full.startswith("mlstate."):
            continue
        if entry.objtype == "module":
            names[full] = {(entry.docname, entry.node_id, False)}
            continue
        parts = full.split(".")[1:]
        is_member = entry.objtype in ("method", "attribute", "property")
        # A method needs its class, unless its name has several words.
        last = len(parts) - (1 + is_member * ("_" not in parts[-1]))
        for start in range(last + 1):
            places = names.setdefault(".".join(parts[start:]), set())
            places.add((entry.docname, entry.node_id, is_member))
    app.config.public_names = names


def write_pages():
    """Write the other generated pages: error messages and notebooks."""
    listed = messages(HERE.parent)
    write_error_index(listed, HERE / "api" / "error_messages.md")
    write_search_scorer(listed, HERE / "search_scorer.js", Path(html_search_scorer))
    for notebook in (HERE.parent / "examples").glob("*.ipynb"):
        shutil.copy(notebook, HERE / "api" / notebook.name)


def collapse_navigation(app, page, template, context, doctree):
    """Show the top of the sidebar and the section of the page, not the pages of all sections."""
    toctree = context["toctree"]
    context["toctree"] = lambda **options: toctree(**options | {"collapse": True, "maxdepth": 2})


def break_names(app, page, template, context, doctree):
    """Let dotted names break after a dot, in the title of a page and in the links at its end."""
    if page.startswith("api/mlstate"):
        context["body"] = re.sub(
            "<h1>[^<]*", lambda title: title[0].replace(".", ".<wbr>"), context["body"], count=1
        )
    for link in filter(None, (context.get("prev"), context.get("next"))):
        link["title"] = link["title"].replace(".", ".<wbr>")


def correct_source_links(app, page, template, context, doctree):
    """Link each object in a source to its own page: Sphinx assumes one module for a whole file."""
    if page.startswith("_modules/"):
        link = r"(/api/((?:\w+\.)+)(\w+)(?:-class)?\.html#)[\w.]+?\.\3\b"
        context["body"] = re.sub(link, r"\1\2\3", context["body"])


def setup(app):
    """Connect the functions above."""
    app.connect("html-page-context", collapse_navigation, priority=400)
    app.connect("html-page-context", break_names)
    app.connect("html-page-context", correct_source_links)
    app.add_config_value("public_names", {}, "", dict)
    app.add_transform(LinkFiles)
    app.add_post_transform(LinkPublicNames)
    app.add_post_transform(LinkTerms)
    app.add_post_transform(DescribePlots)
    app.connect("env-updated", complete_inventory)
    app.connect("env-updated", collect_public_names, priority=600)


write_reference()
write_pages()
report_source_modules()
