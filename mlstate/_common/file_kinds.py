"""What a file or folder is: by first bytes, by names of zip entries, by names in a folder.

kind_of_file   -> by the content of a file, in two steps: kind_of_start, kind_of_zip
explain        -> the error for a file that is not safetensors
kind_of_folder -> by the names in a folder that mlstate does not read
hub_snapshot   -> the folder with the files of a model in the cache of the Hugging Face Hub
dangling_blob  -> the text for a link to a file that is missing

A suffix decides only if the content does not: some formats have no magic number, and a damaged
safetensors file is left to its reader, which names the problem.
"""

from __future__ import annotations

import os
import re
from errno import EINVAL, EISDIR
from typing import IO, TYPE_CHECKING, NamedTuple

from ..errors import FormatError, MLStateError, StoreError
from .regular_file import open_regular
from .text import number_order, printable, shorten

if TYPE_CHECKING:
    from collections.abc import Collection
    from zipfile import ZipInfo

START_BYTES = 512
_MOST_HEADER = 100_000_000  # bytes of a safetensors header
_ZIP_END = b"PK\x05\x06"  # the record that ends a zip archive
_ZIP_END_BYTES = 22  # of this record, without a comment
_MOST_ZIP_END = _ZIP_END_BYTES + (1 << 16)  # with the longest comment


class FileKind(NamedTuple):
    """The format of a file or folder.

    `sentence`: empty for formats that mlstate reads, otherwise the reason and the remedy, to follow
    "PATH: ". `is_damaged`: the file is not complete, or in no known format, such as an error page.
    """

    name: str
    sentence: str = ""
    is_damaged: bool = False


# ---- sentences ----

_AGAIN = "download the file again"
_FOLDER = "pass the folder that holds it"
_SAVE = "and save its arrays by mlstate.save_file"
_SOURCE = "download the weights from which it was converted"
_TRUST = "if you trust who made it, load it with"
_UNPACK = "and pass the file of weights in it"
_WEIGHTS = "pass the file or folder of the weights"

# {quote}: the part of the content that the pattern marks, or the names in an archive or folder.
_DAMAGED = {
    "empty": "it is empty, as after a download or copy that was interrupted: download or copy it "
    "again",
    "zeros": "it starts with zero bytes only, as after a download or copy that was interrupted: "
    "download or copy it again",
    "cut short": "it ends too early: {quote}; download or copy it again",
    "git-LFS pointer": "it is a pointer of git-LFS, not the file itself: run `git lfs pull`, or "
    f"{_AGAIN}",
    "Xet pointer": f"it is a pointer of Xet, not the file itself: {_AGAIN}, with `hf download` if "
    "it is on the Hugging Face Hub",
    "HTML page": "it is an HTML page, as servers send it for a login or an error, not the file "
    f"itself: {_AGAIN}, by the link to its content",
    "XML error": f"it is an error message of an object store, not the file itself: {{quote}}; "
    f"{_AGAIN}",
    "JSON error": f"it is a server's error message, not the file itself: {{quote}}; {_AGAIN}",
    "text": "it is the text {quote}, such as a server's error message, not a file of tensors: "
    f"{_AGAIN}",
    "unknown": "it is damaged, or in a format that mlstate does not read: it starts with {quote}, "
    "unlike files of safetensors, torch.save and numpy.savez",
    "damaged zip": "it is a zip archive whose list of entries is damaged: download or copy it "
    "again",
}
_FOREIGN = {
    "XML": f"it is XML text, which holds no tensors: {_WEIGHTS}",
    "JSON": f"it is JSON text, which holds no tensors: {_WEIGHTS}",
    "mlstate manifest": "it is one file of a checkpoint of mlstate: pass the folder of the "
    "checkpoint",
    "GGUF": "it is a GGUF file: load it with from_pretrained(folder, gguf_file=name) of "
    f"transformers, or read it with GGUFReader of the package gguf, {_SAVE}",
    "GGML": f"it is in the GGML format, which is older than GGUF: {_SOURCE}",
    "HDF5": f"it is an HDF5 file, as Keras writes them: read it with h5py.File, {_SAVE}",
    "npy": "it is one NumPy array without a name: load it with numpy.load, or name it by "
    "numpy.savez",
    "ONNX": f"it is an ONNX model: read it with onnx.load and onnx.numpy_helper.to_array, {_SAVE}",
    "Core ML": "it is a Core ML model, whose weights mlstate does not read: `mlstate coreml "
    "states` lists its states",
    "Core AI": "it is a Core AI model, whose weights mlstate does not read: `mlstate coreai "
    "states` lists its states",
    "flax": "it is a msgpack file, as flax writes them: read it with "
    f"flax.serialization.msgpack_restore, {_SAVE}",
    "orbax": "it is a checkpoint of orbax: restore it with "
    f"orbax.checkpoint.StandardCheckpointer().restore, {_SAVE}",
    "Zarr": f"it is a Zarr array or group: read it with zarr.open, {_SAVE}",
    "TensorFlow checkpoint": "it is a TensorFlow checkpoint, or a file of one: read it with "
    f"tensorflow.train.load_checkpoint, {_SAVE}",
    "TensorFlow graph": "it is a TensorFlow model, or the graph of one: load its folder with "
    "tensorflow.saved_model.load, and save its variables by mlstate.save_file",
    "TensorFlow Lite": f"it is a TensorFlow Lite model: {_SOURCE}",
    "ExecuTorch": f"it is a program of ExecuTorch: {_SOURCE}",
    "Keras": f"it is a Keras model: load it with keras.saving.load_model, {_SAVE}",
    "SentencePiece": f"it is a tokenizer of SentencePiece, which holds no tensors: {_WEIGHTS}",
    "pickle": "it is a pickle, but not one of torch.save, and loading a pickle can run any code: "
    f"{_TRUST} pickle.load or joblib.load, {_SAVE}",
    "torch tar": f"it is in the tar format of the first versions of torch: {_TRUST} "
    "torch.load(path, weights_only=False), and save the result by torch.save",
    "torch.package": f"it is a package of torch.package: {_TRUST} "
    "torch.package.PackageImporter, and save the model's state_dict() by torch.save",
    "TorchScript": "it is a TorchScript program: load it with torch.jit.load, and save its "
    "state_dict() by torch.save",
    "PyTorch export": "it is a program of torch.export: load it with torch.export.load, and save "
    "its state_dict by torch.save",
    "DCP metadata": f"it is the metadata of a torch distributed checkpoint: {_FOLDER}",
    "DCP without metadata": "it is a torch distributed checkpoint without its .metadata, as after "
    "a save that was interrupted: pass the folder of another step",
    "DCP data": f"it is one data file of a torch distributed checkpoint: {_FOLDER}",
    "tar": f"it is a tar archive: unpack it with `tar -xf`, {_UNPACK} (model_weights.ckpt of a "
    ".nemo archive)",
    "7z": f"it is a 7z archive: unpack it with `7z x`, {_UNPACK}",
    "RAR": f"it is a RAR archive: unpack it with `unrar x`, {_UNPACK}",
    "zip": f"it is a zip archive of other files, {{quote}}: unpack it with `unzip`, {_UNPACK}",
    "diffusers": "it is a pipeline of diffusers: pass the folder of one of its models, such as "
    "unet or transformer",
    "Hub cache": "it is the cache of a model of the Hugging Face Hub, without a snapshot of the "
    "branch main: run `hf download`, or pass a folder in its snapshots",
    "Hub caches": "it is the cache of the Hugging Face Hub: pass the folder of one model in it, "
    "of {quote}",
    "prompt store": "it is a store of prompts: use mlstate.PromptStore (mlstate prompts on the "
    "command line)",
    "steps": "it is no checkpoint itself, but holds the steps {quote}: pass the folder of one",
    "unknown folder": "it is no checkpoint that mlstate reads, but holds {quote}: pass one of its "
    "files, or the folder of a checkpoint",
}
_FOREIGN |= {
    tool: f"it is compressed by {tool}: decompress it with `{tool} -dc`, or a tar archive (such as "
    f"a .nemo file) with `tar -xf`, {_UNPACK}"
    for tool in ("gzip", "bzip2", "xz", "zstd", "lz4")
}


def _kind(name: str, quote: str = "") -> FileKind:
    """Return the kind of this name; `quote`: for its sentence."""
    sentence = _DAMAGED.get(name) or _FOREIGN.get(name, "")
    return FileKind(name, sentence.format(quote=quote), name in _DAMAGED)


# ---- files ----

_TEXT = rb"(?:\xef\xbb\xbf)?\s*"
# Patterns of the first bytes, for `re.DOTALL`; the first that matches counts. They are the magic
# numbers of the formats' specifications, or else the first fields that their writers store.
_STARTS = (
    (rb"\Z", "empty"),
    # the magic number of torch as a pickle; from protocol 4 on, in a frame
    (rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", "torch"),
    (rb"\0+\Z", "zeros"),
    (rb"version https://(?:git-lfs|hawser)\.github\.com/", "git-LFS pointer"),
    (rb"# xet version ", "Xet pointer"),
    (_TEXT + rb"(?:<\?xml[^>]*>\s*)?<(?i:!doctype html|html|head)\b", "HTML page"),
    (_TEXT + rb"(?:<\?xml[^>]*>\s*)?(<Error>.*)", "XML error"),
    (_TEXT + rb"<\?xml", "XML"),
    (_TEXT + rb'\{.*"weight_map"', "weights index"),
    (_TEXT + rb'\{.*"mlstate\.(?:manifest|index)"', "mlstate manifest"),
    (_TEXT + rb'(\{\s*"(?:errors?|message|detail|statusCode)".*)', "JSON error"),
    (_TEXT + rb'(?:\{\s*["}]|\[\s*["{\[\d\]-])', "JSON"),
    (rb"GGUF", "GGUF"),
    (rb"(?:lmg|fmg|tjg|alg)g", "GGML"),
    (rb"\x89HDF\r\n\x1a\n", "HDF5"),
    (rb"\x93NUMPY", "npy"),
    (rb"\x80[\x02-\x05].{,14}torch\.distributed\.checkpoint\.metadata", "DCP metadata"),
    (rb"\x80[\x02-\x05]|\([dl]p[01]\n|[}\]]q\0", "pickle"),
    # a map, whose first key is text
    (rb"(?:[\x81-\x8f]|\xde..|\xdf.{4})(?:[\xa1-\xbf]|\xd9.)[ -~]+[\x80-\xff]", "flax"),
    (rb"(?:sys_info|pickle|tensors|storages)\0.{,256}ustar", "torch tar"),
    (rb".{257}ustar", "tar"),
    (rb"\x1f\x8b\x08", "gzip"),
    (rb"BZh[1-9]", "bzip2"),
    (rb"\xfd7zXZ\0", "xz"),
    (rb"\x28\xb5\x2f\xfd", "zstd"),
    (rb"\x04\x22\x4d\x18", "lz4"),
    (rb"7z\xbc\xaf\x27\x1c", "7z"),
    (rb"Rar!\x1a\x07", "RAR"),
    (rb".{4}TFL3", "TensorFlow Lite"),
    (rb".{4}ET\d\d", "ExecuTorch"),
    # a table whose first entry has no name; its value has the number of files and a version
    (rb"\0\0.\x08.{1,5}?\x1a.\x08", "TensorFlow checkpoint"),
    # Protobuf: the first piece with its score; a schema, then the metadata of a graph; a version,
    # then a text or a graph; a version, then a description.
    (rb"\n.\n.[^\x15]{1,64}\x15.{4}[\n\x18]", "SentencePiece"),
    (rb"\x08\x01\x12[\x80-\xff]{,4}.\n[\x80-\xff]{,4}.[\x12\x22*]", "TensorFlow graph"),
    (rb"\x08[\x01-\x3f][\x12\x1a\x22\x32][\x01-\x7f][ -~]{3}", "ONNX"),
    (rb"\x08[\x01-\x3f](?:\x3a[\x80-\xff]{,4}.[\n\x12*]|\x42.[\n\x10])", "ONNX"),
    (rb"\x08[\x01-\x3f]\x12[\x80-\xff]{,4}.(?:[\nRj]|\xa2[\x01\x06])", "Core ML"),
    # a whole file of text in UTF-8
    (rb"(?!.{512})(?:[\t\n\r -~]|[\xc2-\xf4][\x80-\xbf]{1,3})+\Z", "text"),
)
# Formats without a magic number, and safetensors, whose reader describes damage.
_UNMARKED_SUFFIXES = {
    ".joblib": "pickle",  # compressed
    ".data": "TensorFlow checkpoint",
    ".mlmodel": "Core ML",
    ".onnx": "ONNX",
    ".pb": "TensorFlow graph",
    ".safetensors": "safetensors",
}
_FOREIGN_SUFFIXES = _UNMARKED_SUFFIXES | {
    ".gguf": "GGUF",
    ".h5": "HDF5",
    ".keras": "Keras",
    ".msgpack": "flax",
    ".nemo": "tar",
    ".npy": "npy",
    ".pkl": "pickle",
    ".pt2": "PyTorch export",
    ".tflite": "TensorFlow Lite",
}
_ENTRIES = {  # an entry's path below the archive's first folder, if it has one
    "constants.pkl": "TorchScript",
    "archive_format": "PyTorch export",
    "serialized_exported_program.json": "PyTorch export",
    ".data/extern_modules": "torch.package",
    "data.pkl": "torch",
    "model.weights.h5": "Keras",
}


def _quoted(data: bytes, most: int) -> str:
    """Return the first `most` bytes as a literal of printable ASCII."""
    return repr(data.strip()[:most])[1:]


def _listed(names: Collection[str]) -> str:
    """Return the first three names, and the number of the others."""
    first = ", ".join(shorten(name, 60) for name in sorted(names, key=number_order)[:3])
    return f"{first} and {len(names) - 3:,} more" if len(names) > 3 else first


def kind_of_start(start: bytes, size: int, suffix: str = "") -> FileKind:
    """Return the kind of a file of `size` bytes, by its first `START_BYTES` or all of them.

    For "zip" without a sentence, `kind_of_zip` knows more. `suffix`: of the file's name.
    """
    header = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and 2 <= header <= _MOST_HEADER:
        if header <= size - 8:
            return FileKind("safetensors")
        problem = f"its header should have {header} bytes, but only {size - 8} follow"
        return _kind("cut short", problem)
    if start.startswith((b"PK\x03\x04", _ZIP_END)):
        return FileKind("zip")
    for pattern, name in _STARTS:
        if match := re.match(pattern, start, re.DOTALL):
            return _kind(name, _quoted(match[match.lastindex or 0], 100))
    # the suffix of TensorFlow's files ends with their number, as in .data-00000-of-00001
    name = _UNMARKED_SUFFIXES.get(suffix.lower().partition("-")[0], "unknown")
    return _kind(name, _quoted(start, 16))


def _zip_entries(file: IO[bytes]) -> list[ZipInfo]:
    """Return the entries of an open zip archive; raise ValueError if their list is damaged."""
    import zipfile

    try:
        with zipfile.ZipFile(file) as archive:
            return archive.infolist()
    except MemoryError:
        raise
    except Exception as error:  # damage raises errors of many classes
        if getattr(error, "errno", None) not in (None, EINVAL):
            raise
        raise ValueError from error


def _follows_archive(file: IO[bytes], entries: list[ZipInfo]) -> bool:
    """Return whether another archive ends where the archive with these entries starts."""
    start = min(entry.header_offset for entry in entries)
    file.seek(max(0, start - _ZIP_END_BYTES))
    return file.read(len(_ZIP_END)) == _ZIP_END


def _kind_of_entries(file: IO[bytes], entries: list[ZipInfo], suffix: str) -> FileKind:
    """Return the kind of an open zip archive with these entries; `suffix`: of its name."""
    names = {entry.filename for entry in entries}
    paths = names | {name.partition("/")[2] for name in names}
    kind = next((kind for path, kind in _ENTRIES.items() if path in paths), "")
    if kind == "torch" and (suffix == ".distcp" or _follows_archive(file, entries)):
        kind = "DCP data"  # an archive for each tensor, one after the other
    if not kind:
        kind = "npz" if all(name.endswith(".npy") for name in names) else "zip"
    return _kind(kind, _listed(names))


def kind_of_zip(file: str | os.PathLike[str] | IO[bytes], suffix: str = "") -> FileKind:
    """Return the kind of a zip archive by the names of its entries; "torch" and "npz" are read.

    `file`: a path, or an open file, which is left at any position. `suffix`: of its name.
    """
    if isinstance(file, str | os.PathLike):
        with open_regular(file) as opened:
            return kind_of_zip(opened, suffix or os.path.splitext(file)[1])
    try:
        entries = _zip_entries(file)
    except ValueError:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_ZIP_END))
        if _ZIP_END in file.read(_MOST_ZIP_END):
            return _kind("damaged zip")
        return _kind("cut short", "the list of entries at the end of a zip archive is missing")
    return _kind_of_entries(file, entries, suffix)


def is_damage(error: MLStateError) -> bool:
    """Return whether the error of a refused file means damage; its `got` is the kind's name."""
    return error.got in {*_DAMAGED, "link", "special file"}


def kind_of_file(path: str | os.PathLike[str]) -> FileKind:
    """Return the kind of a regular file by its content; raises as `open_regular`, and OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        suffix = os.path.splitext(path)[1]
        kind = kind_of_start(file.read(START_BYTES), size, suffix)
        return kind_of_zip(file, suffix) if kind.name == "zip" else kind


def explain(
    error: FormatError | StoreError, path: str | bytes | os.PathLike[str]
) -> FormatError | StoreError:
    """Return the error of a reader of safetensors; its text names the format of another file.

    The text stays if the file is safetensors or in no known format. The error of a missing file
    tells if a link leads to it.
    """
    if isinstance(error, StoreError):
        hint = ": mlstate.load reads folders" if error.errno == EISDIR else ""
        error.strerror = dangling_blob(os.fsdecode(path)) or f"{error.strerror}{hint}"
        return error
    try:
        kind = kind_of_file(os.fsdecode(path))
    except (FormatError, OSError):
        return error
    if kind.name not in ("safetensors", "cut short", "unknown"):
        sentence = kind.sentence or f"it is a file of {kind.name}, which mlstate.load reads"
        error.args = (f"{os.fsdecode(path)}: {sentence}",)
        error.__notes__ = []  # the sentence has the remedy
    return error


# ---- folders ----

# Patterns of the sorted names in a folder, one a line, for `re.MULTILINE` and `re.DOTALL`.
_FOLDERS = (
    (r"^(?:_CHECKPOINT_METADATA|_METADATA|orbax\.checkpoint|manifest\.ocdbt)$", "orbax"),
    (r"^(?:\.zarray|\.zgroup|zarr\.json)$", "Zarr"),
    (r"^saved_model\.pb$", "TensorFlow graph"),
    (r"\.data-\d+-of-\d+$", "TensorFlow checkpoint"),
    (r"^Data$.*^Manifest\.json$|^coremldata\.bin$", "Core ML"),
    (r"^main\.mlirb$", "Core AI"),
    (r"^model_index\.json$", "diffusers"),
    (r"\A(?!.*^\.metadata$).*\.distcp$", "DCP without metadata"),
    (r"^blobs$.*^snapshots$", "Hub cache"),
    (r"^segment-\d+$.*^store$|\A(?:index\n)?store(?:\nused)?\Z", "prompt store"),
)
_STEP = r"(?:(?:global_?step|checkpoint|ckpt|step|iter|epoch)[-_=]?)?[0-9]+"
_READ_SUFFIXES = (".safetensors", ".npz", ".pt", ".pth", ".bin", ".ckpt")


def _kind_of_one_file(names: Collection[str]) -> FileKind | None:
    """Return the kind of the first file in a format that mlstate does not read; else None.

    Also None if the folder has files that mlstate reads.
    """
    if any(name.lower().endswith(_READ_SUFFIXES) for name in names):
        return None
    for name in sorted(names):
        kind = _FOREIGN_SUFFIXES.get(os.path.splitext(name)[1].lower())
        if kind is not None:
            file = f"its file {shorten(name, 60)} is"
            return FileKind(kind, _kind(kind).sentence.replace("it is", file, 1))
    return None


def kind_of_folder(names: Collection[str]) -> FileKind | None:
    """Return the kind of a folder that mlstate does not read; None if it is empty.

    `names`: of the files and folders in it. The caller looks for the formats that mlstate reads
    first, since their folders may have such files too.
    """
    lines = "\n".join(sorted(names))
    for pattern, kind in _FOLDERS:
        if re.search(pattern, lines, re.MULTILINE | re.DOTALL):
            return _kind(kind)
    for pattern, kind in ((r"models--.+", "Hub caches"), (_STEP, "steps")):
        parts = sorted((name for name in names if re.fullmatch(pattern, name)), key=number_order)
        if parts:
            last = [shorten(name, 60) for name in parts[-4:]]
            return _kind(kind, ", ".join(["…", *last] if len(parts) > 4 else last))
    return _kind_of_one_file(names) or (_kind("unknown folder", _listed(names)) if names else None)


# ---- cache of the Hugging Face Hub ----


def hub_snapshot(path: str) -> str | None:
    """Return the folder with the files of a cached model, such as ``models--org--name``.

    It is the snapshot of the branch main, or else the only one; None if there is none, or if `path`
    is another kind of folder.
    """
    snapshots = os.path.join(path, "snapshots")
    if not os.path.isdir(os.path.join(path, "blobs")) or not os.path.isdir(snapshots):
        return None
    revisions = [entry.name for entry in os.scandir(snapshots) if entry.is_dir()]
    try:
        with open_regular(os.path.join(path, "refs", "main")) as file:
            main = file.read(START_BYTES).decode("ascii", "replace").strip()
    except (OSError, FormatError):
        main = ""
    if main in revisions:
        revisions = [main]
    return os.path.join(snapshots, revisions[0]) if len(revisions) == 1 else None


def dangling_blob(path: str | os.PathLike[str]) -> str | None:
    """Return the sentence for a link whose target is missing; None for all other paths."""
    if os.path.exists(path) or not os.path.islink(path):
        return None
    blob = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    remedy = "restore this file, or remove the link"
    in_cache = r".*/models--([^/]+)/snapshots/([^/]+)/(.+)"
    if cached := re.fullmatch(in_cache, os.path.abspath(path), re.DOTALL):
        repository, revision, name = cached[1].replace("--", "/"), cached[2], cached[3]
        remedy = f"run `hf download {repository} {name} --revision {revision}`"
    return f"it is a link to {printable(blob)}, which is missing: {printable(remedy)}"
