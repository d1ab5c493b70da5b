"""Shapes of a mixture of experts with a trillion parameters, divided among thousands of ranks.

Only shapes: arrays are views of one element. The sizes come from an open model of that class: 61
layers, the first of them dense, the others with 384 experts, 8 of them for each token; hidden size
7168.
"""

import itertools
import math
import os
from pathlib import Path

import numpy as np

from mlstate import _core
from mlstate.checkpoint import Layout, Shard, plan_load, plan_save
from mlstate.checkpoint._store.checkpoint_files import CheckpointFiles, patterns_of
from mlstate.checkpoint._store.index_patterns import with_patterns
from mlstate.checkpoint._store.manifest import IndexRecord, Manifest, build
from mlstate.checkpoint._store.open_path import open_files
from mlstate.checkpoint.records import LoadPlan

HIDDEN, INNER, EXPERTS, LAYERS, VOCABULARY = 7168, 2048, 384, 61, 163840
STATES = ("m", "master", "v")
GENERATION = "0" * 16

ATTENTION = {
    "self_attn.q_a_proj.weight": (1536, HIDDEN),
    "self_attn.q_a_layernorm.weight": (1536,),
    "self_attn.q_b_proj.weight": (64 * 192, 1536),
    "self_attn.kv_a_proj.weight": (576, HIDDEN),
    "self_attn.kv_a_layernorm.weight": (512,),
    "self_attn.kv_b_proj.weight": (64 * 256, 512),
    "self_attn.o_proj.weight": (HIDDEN, 64 * 128),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}
EXPERT = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def mlp(prefix, inner):
    return {
        f"{prefix}.gate_proj.weight": (inner, HIDDEN),
        f"{prefix}.up_proj.weight": (inner, HIDDEN),
        f"{prefix}.down_proj.weight": (HIDDEN, inner),
    }


def dense_tensors(layers=LAYERS):
    """Name and shape of all tensors that do not belong to an expert."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for layer in range(layers):
        layer_shapes = dict(ATTENTION)
        layer_shapes |= mlp("mlp", 18432) if layer == 0 else mlp("mlp.shared_experts", INNER)
        layer_shapes |= {} if layer == 0 else {"mlp.gate.weight": (EXPERTS, HIDDEN)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    return shapes


class Moe:
    """The model for a world of `across` x `along` ranks.

    Experts are divided among `across` groups of ranks, and each matrix by rows among the `along`
    ranks of a group; all other tensors are divided flat among all ranks. `stacked`: the experts of
    a layer are one tensor; otherwise each matrix of each expert is one.
    """

    def __init__(self, world, *, across=64, layers=LAYERS, stacked=True):
        assert world % across == 0
        assert EXPERTS % across == 0 or stacked
        self.world, self.across, self.along = world, across, world // across
        self.layers, self.stacked = layers, stacked

    def parameters(self, rank):
        """Name, shape, layout and part of all parameters that this rank stores."""
        for name, shape in dense_tensors(self.layers).items():
            yield name, shape, Layout.flat(self.world), rank
        if self.stacked:
            layout = Layout([(0, self.across), (1, self.along)])
            for layer, (name, shape) in itertools.product(range(1, self.layers), EXPERT.items()):
                yield f"model.layers.{layer}.mlp.experts.{name}", (EXPERTS, *shape), layout, rank
            return
        group, part = divmod(rank, self.along)
        each = EXPERTS // self.across
        layout = Layout.rows(self.along)
        for layer, expert in itertools.product(
            range(1, self.layers), range(group * each, (group + 1) * each)
        ):
            for name, shape in EXPERT.items():
                full = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                yield full, shape, layout, part

    def states(self, rank):
        """The rank's model (16 bits) and optimizer (32 bits), as shards without data."""
        model, optimizer = {}, {}
        narrow, wide = np.zeros((), np.float16), np.zeros((), np.float32)
        for name, shape, layout, part in self.parameters(rank):
            of = layout.shape(shape, part)
            model[name] = Shard(np.broadcast_to(narrow, of), layout, part, shape=shape)
            array = np.broadcast_to(wide, of)
            for state in STATES:
                optimizer[f"{name}.{state}"] = Shard(array, layout, part, shape=shape)
        return model, optimizer

    def count(self):
        """Number of parameters of the model."""
        dense = sum(map(math.prod, dense_tensors(self.layers).values()))
        return dense + (self.layers - 1) * EXPERTS * sum(map(math.prod, EXPERT.values()))

    def plan(self, rank):
        return plan_save(*self.states(rank), rank=rank, world_size=self.world)

    def rank_report(self, rank):
        """A rank's report to the first rank, and the text of its index."""
        plan = self.plan(rank)
        merged = _core.MergedIndex((plan.index_text,), ("index",))
        [pattern] = patterns_of(merged)
        path = f"index/{GENERATION}.{rank}.json"
        crc = f"{_core.crc32c(plan.index_text):08x}"
        record = IndexRecord(path, len(plan.index_text), crc, plan.shards, plan.data_bytes)
        return record, pattern._asdict(), plan.index_text


class Simulated:
    """A checkpoint of a `Moe` without shard files, and only with the indexes that are read.

    The ranks that are read were planned in full. For all others the manifest has the data that
    differ between ranks of one pattern.
    """

    def __init__(self, folder, moe, ranks):
        self.folder, self.moe = Path(folder), moe
        (self.folder / "index").mkdir(parents=True)
        firsts = [0] if moe.stacked else range(0, moe.world, moe.along)
        reports = {rank: moe.rank_report(rank) for rank in sorted({*ranks, *firsts})}
        for record, _, text in reports.values():
            (self.folder / record.path).write_bytes(text)
        records = [
            reports[r][:2] if r in reports else self._like(r, reports) for r in range(moe.world)
        ]
        manifest = Manifest(
            generation=GENERATION,
            sequence=1,
            created="2026-11-22T00:00:00.000000Z",
            writer="mlstate simulated",
            step=1,
            world_size=moe.world,
            model={"kind": "state"},
            optimizer={"kind": "state"},
            metadata={},
            indexes=tuple(record for record, _ in records),
        )
        manifest, _ = with_patterns(
            open_files(folder), manifest, [pattern for _, pattern in records]
        )
        self.patterns = len(manifest.patterns)
        self.manifest_bytes = (self.folder / "manifest.json").write_bytes(build(manifest))
        self.index_bytes = sum(record.bytes for record in manifest.indexes)

    def _like(self, rank, reports):
        """A rank whose index is not read: a copy of the first of its pattern, except its parts."""
        record, pattern, _ = reports[0 if self.moe.stacked else rank - rank % self.moe.along]
        cut = rank if self.moe.stacked else rank % self.moe.along
        # groups are in the order of names: "lm_head" comes before "model.layers.1.mlp.experts"
        assert len(pattern["parts"]) == 2
        path = f"index/{GENERATION}.{rank}.json"
        return record._replace(path=path), {**pattern, "parts": (rank, cut)}

    def plan_load(self, moe, rank):
        """The plan of a rank of this or another world: dense tensors, then the experts."""
        dense = list(dense_tensors(moe.layers))
        experts = [name for name, *_ in moe.parameters(rank) if ".mlp.experts." in name]
        both = Layout([(0, moe.across), (1, moe.along)])
        asks = [(dense, Layout.flat(moe.world), rank)]
        if moe.stacked:
            asks.append((experts, both, rank))
        else:
            asks.append((experts, Layout.rows(moe.along), rank % moe.along))
        plans = [
            plan_load(self.folder, names=names, rank=part, world_size=layout.parts, layout=layout)
            for names, layout, part in asks
        ]
        indexes = {path: size for plan in plans for path, size in plan.indexes.items()}
        reads = [read for plan in plans for read in plan.reads]
        return LoadPlan(plans[0].manifest_bytes, indexes, reads)

    @classmethod
    def for_loads(cls, folder, moe, loads):
        """A checkpoint with the indexes that `loads`, pairs of a `Moe` and a rank, need."""
        bare = cls(Path(folder) / "bare", moe, [])
        planned = {}
        load_merged_index = CheckpointFiles.load_merged_index

        def listen(files, manifest, ranks, texts):
            for rank in set(ranks) - set(planned):
                planned[rank], _, text = moe.rank_report(rank)
                (bare.folder / planned[rank].path).write_bytes(text)
            records = list(manifest.indexes)
            for rank, record in planned.items():
                records[rank] = record
            return load_merged_index(files, manifest._replace(indexes=tuple(records)), ranks, texts)

        CheckpointFiles.load_merged_index = listen
        try:
            for other, rank in loads:
                bare.plan_load(other, rank)
        finally:
            CheckpointFiles.load_merged_index = load_merged_index
        return cls(Path(folder) / "simulated", moe, planned)

    def __str__(self):
        return os.fspath(self.folder)
