"""The Swift package, as far as it can be checked without a Swift compiler.

tree-sitter-swift parses the files. It finds errors of syntax, not of types.
"""

import re
from pathlib import Path

import pytest

tree_sitter = pytest.importorskip("tree_sitter")
tree_sitter_swift = pytest.importorskip("tree_sitter_swift")

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "Package.swift", *sorted((ROOT / "swift").rglob("*.swift"))]
FILES = [path for path in FILES if path.exists()]
PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_swift.language()))

pytestmark = pytest.mark.skipif(not FILES, reason="no Swift sources beside these tests")


def nodes(text):
    """Return all nodes of a source, the outer ones first."""
    tree = [PARSER.parse(text.encode()).root_node]
    for node in tree:
        tree += node.children
    return tree


def syntax_errors(text):
    return [
        f"line {node.start_point[0] + 1}: {node.text.decode()[:60]!r}"
        for node in nodes(text)
        if node.is_error or node.is_missing
    ]


def calls(text):
    """Return (name, number of arguments) of each call of a C function."""
    return [
        (name, sum(child.type == "value_argument" for child in arguments.children))
        for node in nodes(text)
        if node.type == "call_expression"
        and (name := node.children[0].text.decode()).startswith("mlstate_kv_")
        for suffix in node.children[1:]
        for arguments in suffix.children
        if arguments.type == "value_arguments"
    ]


def header():
    text = (ROOT / "include" / "mlstate" / "kv.h").read_text()
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def prototypes():
    """Return {name: number of parameters} of the header's functions."""
    declared = re.findall(r"(mlstate_kv_\w+)\(([^)]*)\);", header())
    return {name: 0 if text == "void" else text.count(",") + 1 for name, text in declared}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_swift_file_has_no_syntax_error(path):
    assert not syntax_errors(path.read_text())


def test_parser_reports_a_syntax_error():
    source = (ROOT / "swift" / "Sources" / "MLState" / "Transition.swift").read_text()
    assert syntax_errors(source.replace("throws -> MLMultiArray {", "throws -> {", 1))
    assert syntax_errors(source[: source.rindex("}")])


def test_c_functions_are_called_with_their_number_of_arguments():
    expected = prototypes()
    assert len(expected) == 12
    calls_of_c = [call for path in FILES for call in calls(path.read_text())]
    assert {name for name, _ in calls_of_c} >= {
        "mlstate_kv_expand", "mlstate_kv_compact", "mlstate_kv_mask", "mlstate_kv_error_text",
    }  # fmt: skip
    assert [call for call in calls_of_c if expected.get(call[0]) != call[1]] == []


def test_constants_of_the_header_exist():
    constants = {
        name for path in FILES for name in re.findall(r"\bMLSTATE_KV_\w+", path.read_text())
    }
    assert constants - {"MLSTATE_KV_ERROR_"}
    assert {name for name in constants if not re.search(rf"\b{name}", header())} == set()


@pytest.mark.parametrize(
    "signature",
    [
        "transitionKVState( sourceState: MLMultiArray, targetSeqLength: Int, currentPosition: Int?",
        "compactKVState( sourceState: MLMultiArray, targetSeqLength: Int, currentPosition: Int,",
        "transitionCoreMLState( sourceState: MLState, targetState: MLState, stateName: String",
        "transitionState( source: MLState, target: MLState, name: String, position: Int",
        "attentionSizeMask( seqLength: Int, attentionSize: Int",
    ],
)
def test_public_function_has_its_signature(signature):
    sources = " ".join(path.read_text() for path in FILES)
    assert f"public func {signature}" in re.sub(r"\s+", " ", sources)


def test_page_depends_on_products_of_the_manifest():
    page = (ROOT / "docs" / "c.md").read_text(encoding="utf-8")
    manifest = (ROOT / "Package.swift").read_text(encoding="utf-8")
    names = {*re.findall(r'\.product\(name: "(\w+)"', page), *re.findall(r"product `(\w+)`", page)}
    assert len(names) == 2
    assert names == set(re.findall(r'\.library\(name: "(\w+)"', manifest))


def test_manifest_names_existing_folders():
    text = (ROOT / "Package.swift").read_text()
    paths = re.findall(r'"((?:csrc|swift|include)[\w/.]*)"', text)
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []
    module = (ROOT / "include" / "module.modulemap").read_text()
    assert 'name: "CMLState"' in text and module.startswith("module CMLState {")
