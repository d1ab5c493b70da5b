"""Compute the states that a power failure can leave on disk, from a recording of a program's calls.

The shim's log has an entry for each change below the root: C create, M make a folder, D delete, R
rename, E exchange two names, L link, W write, T truncate, S sync (a file, a folder, or with inode 0
everything), N a note of the program, X a change that cannot be replayed (an error here).

The model is a conservative one of ext4 and similar file systems:

- Synced data survive: the bytes of a synced file, the names in a synced folder.  A
  synced file's own name is not, until its folder is synced.
- Other writes may be lost, kept or torn, page by page, in any order; the bytes
  between kept ones read as zeros, and the length may have grown without the bytes.
- Of the other changes of names in a folder, any prefix survives: they keep their order.  A
  rename between two folders happens in both or in neither.
"""

import hashlib
import itertools

PAGE = 4096


class Entry:
    """One entry of the log."""

    __slots__ = ("a", "b", "data", "kind", "name", "number", "other")

    def __init__(self, kind, a=0, b=0, number=0, name="", other="", data=b""):
        self.kind, self.a, self.b, self.number = kind, a, b, number
        self.name, self.other, self.data = name, other, data

    def __repr__(self):
        data = f" {len(self.data)} bytes" if self.data else ""
        return f"{self.kind} {self.a} {self.b} {self.number} {self.name} {self.other}{data}"


def parse(log):
    """The entries of a log, without a truncated last one."""
    entries = []
    at = 0
    while (end := log.find(b"\n", at)) >= 0:
        kind, *numbers = log[at:end].split()
        a, b, number, *lengths = map(int, numbers)
        if end + 1 + sum(lengths) > len(log):
            break
        pieces = []
        at = end + 1
        for length in lengths:
            pieces.append(log[at : at + length])
            at += length
        name, other = (piece.decode("utf-8", "surrogateescape") for piece in pieces[:2])
        entries.append(Entry(kind.decode(), a, b, number, name, other, pieces[2]))
    return entries


class File:
    """A file's bytes: the durable ones, and the changes since."""

    def __init__(self, safe=b""):
        self.safe = safe
        self.current = bytearray(safe)
        self.pending = []  # entries W and T

    def apply(self, entry):
        change(self.current, entry)
        self.pending.append(entry)

    def sync(self):
        if self.pending:
            self.safe = bytes(self.current)
            self.pending = []


class Folder:
    """A folder's names: the durable ones, and the changes since, in order."""

    def __init__(self):
        self.safe = {}
        self.current = {}
        self.pending = []  # instances of Change


class Change:
    """One change of names, in one folder or, for a rename between two, in both."""

    __slots__ = ("names", "order")

    def __init__(self, order, names):
        self.order = order
        self.names = names  # (folder, name, File or Folder or None)

    def folders(self):
        return [folder for folder, _, _ in self.names]


def change(content, entry, pages=None):
    """Apply a write or truncation; of a write only `pages`, if given."""
    if entry.kind == "T":
        del content[entry.number :]
        content.extend(bytes(entry.number - len(content)))
        return
    start, end = entry.number, entry.number + len(entry.data)
    for page in pages if pages is not None else (None,):
        low = start if page is None else max(start, page * PAGE)
        high = end if page is None else min(end, (page + 1) * PAGE)
        content.extend(bytes(max(0, low - len(content))))
        content[low:high] = entry.data[low - start : high - start]


class Disk:
    """The files below a root while a recording is replayed."""

    def __init__(self, root):
        self.orders = itertools.count()
        self.by_inode = {}
        self.root = self._scan(root)
        self.notes = []

    def _scan(self, path):
        folder = Folder()
        self.by_inode[path.stat().st_ino] = folder
        for item in path.iterdir():
            if item.is_dir():
                folder.safe[item.name] = self._scan(item)
            else:
                file = self.by_inode[item.stat().st_ino] = File(item.read_bytes())
                folder.safe[item.name] = file
        folder.current = dict(folder.safe)
        return folder

    def _rename(self, *names):
        change = Change(next(self.orders), names)
        for folder, name, thing in names:
            if thing is None:
                folder.current.pop(name, None)
            else:
                folder.current[name] = thing
        for folder in {id(f): f for f in change.folders()}.values():
            folder.pending.append(change)

    def apply(self, entry):
        """Carry out one entry."""
        nodes = self.by_inode
        if entry.kind in "WT":
            nodes[entry.a].apply(entry)
        elif entry.kind in "CM":
            # the number of a deleted inode is used again
            node = nodes[entry.b] = File() if entry.kind == "C" else Folder()
            if entry.a:
                self._rename((nodes[entry.a], entry.name, node))
        elif entry.kind == "L":
            self._rename((nodes[entry.a], entry.name, nodes[entry.b]))
        elif entry.kind == "D":
            self._rename((nodes[entry.a], entry.name, None))
        elif entry.kind == "R":
            source, target = nodes[entry.a], nodes[entry.b]
            moved = source.current[entry.name]
            self._rename((source, entry.name, None), (target, entry.other, moved))
        elif entry.kind == "E":
            source, target = nodes[entry.a], nodes[entry.b]
            moved, other = source.current[entry.name], target.current[entry.other]
            self._rename((source, entry.name, other), (target, entry.other, moved))
        elif entry.kind == "S":
            self._sync(None if entry.a == 0 else nodes[entry.a])
        elif entry.kind == "N":
            self.notes.append(entry.name)
        else:
            raise ValueError(f"not to be replayed: {entry.name}")

    def _sync(self, thing):
        if isinstance(thing, File):
            thing.sync()
            return
        things = self.by_inode.values() if thing is None else [thing]
        for file in things:
            if isinstance(file, File):
                file.sync()
        synced = {id(c): c for f in things if isinstance(f, Folder) for c in f.pending}
        while True:  # a change is durable once all earlier changes of its folders are
            before = {
                id(earlier): earlier
                for change in synced.values()
                for folder in change.folders()
                for earlier in folder.pending
                if earlier.order < change.order
            }
            if before.keys() <= synced.keys():
                break
            synced |= before
        for change in sorted(synced.values(), key=lambda c: c.order):
            for folder, name, target in change.names:
                put(folder.safe, name, target)
        for folder in {id(f): f for change in synced.values() for f in change.folders()}.values():
            folder.pending = [c for c in folder.pending if id(c) not in synced]

    def pending_names(self):
        """All changes of names that are not durable, in order."""
        changes_by_order = {}
        for thing in self.by_inode.values():
            if isinstance(thing, Folder):
                changes_by_order.update((c.order, c) for c in thing.pending)
        return [changes_by_order[order] for order in sorted(changes_by_order)]


def put(names, name, thing):
    """Set or delete an entry of a folder."""
    if thing is None:
        names.pop(name, None)
    else:
        names[name] = thing


# ---- what a failure leaves ----


def names_kept(disk, rng, how):
    """The changes of names that survive: none, all, a prefix, or a prefix for each folder."""
    pending = disk.pending_names()
    if how in ("none", "all"):
        return pending if how == "all" else []
    if how == "prefix":
        return pending[: rng.randint(0, len(pending))]
    cut = {}
    for change in pending:
        for folder in change.folders():
            cut.setdefault(id(folder), rng.choice(folder.pending).order + rng.randint(0, 1))
    while True:  # a rename between folders happens in both or in neither
        out = [c for c in pending if any(c.order >= cut[id(f)] for f in c.folders())]
        lower = dict(cut)
        for change in out:
            for folder in change.folders():
                lower[id(folder)] = min(lower[id(folder)], change.order)
        if lower == cut:
            return [c for c in pending if c not in out]
        cut = lower


def bytes_kept(file, rng, how):
    """A file's content: without the unsynced writes, with all of them, with zeros, or with some."""
    if not file.pending or how == "none":
        return file.safe
    if how == "all":
        return bytes(file.current)
    content = bytearray(file.safe)
    if how == "some":
        odds = rng.choice((0.1, 0.5, 0.9))
        for entry in file.pending:
            fate = rng.random()
            if entry.kind == "T" or fate < odds / 2:
                if rng.random() < 0.5 or fate < odds / 2:
                    change(content, entry)
            elif fate < odds:
                first = entry.number // PAGE
                last = (entry.number + len(entry.data) - 1) // PAGE
                pages = [page for page in range(first, last + 1) if rng.random() < 0.5]
                change(content, entry, pages)
    if how == "zeros" or rng.random() < 0.25:
        content.extend(bytes(max(0, len(file.current) - len(content))))
    return bytes(content)


def tree(disk, rng, names="some", data="some"):
    """One state of the disk: nested dicts with bytes as leaves."""
    safe = {}
    for change in names_kept(disk, rng, names):
        for folder, name, thing in change.names:
            put(safe.setdefault(id(folder), dict(folder.safe)), name, thing)
    contents = {}

    def content(thing):
        if isinstance(thing, Folder):
            entries = safe.get(id(thing), thing.safe)
            return {name: content(entries[name]) for name in sorted(entries)}
        if id(thing) not in contents:
            contents[id(thing)] = bytes_kept(thing, rng, data)
        return contents[id(thing)]

    return content(disk.root)


# The extreme states, tried at each point: (names, data).
CORNERS = [
    ("none", "none"), ("all", "all"), ("all", "none"), ("all", "zeros"), ("none", "all"),
    ("all", "some"), ("prefix", "none"),
]  # fmt: skip


def states(disk, rng, samples):
    """The trees that a power failure could leave now: the extremes, and `samples` random ones."""
    for names, data in CORNERS:
        yield tree(disk, rng, names, data)
    for _ in range(samples):
        yield tree(disk, rng, rng.choice(("prefix", "each", "all")), "some")


def digest(state):
    """A value that is equal for equal trees."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, content in state.items():
        inner = digest(content) if isinstance(content, dict) else content
        kind = b"d" if isinstance(content, dict) else b"f"
        hasher.update(kind + name.encode("utf-8", "surrogateescape") + b"\0")
        hasher.update(len(inner).to_bytes(8, "little") + inner)
    return hasher.digest()


def materialise(state, folder):
    """Write a tree into an empty folder."""
    for name, content in state.items():
        if isinstance(content, dict):
            (folder / name).mkdir()
            materialise(content, folder / name)
        else:
            (folder / name).write_bytes(content)


def content_of(folder):
    """The tree of a folder: what `materialise` writes."""
    return {
        path.name: content_of(path) if path.is_dir() else path.read_bytes()
        for path in folder.iterdir()
    }
