"""Single files of other programs, for `foreign_kinds.KINDS`."""

import argparse
import io
import pickle
import tarfile

import numpy as np
import torch
from foreign_kinds import (
    KINDS,
    Sample,
    loads,
    moments,
    network,
    read_safetensors,
    read_torch,
    refused,
    run_sample,
    run_tree,
    saved,
    stored,
)

BEFORE_1_6 = {"_use_new_zipfile_serialization": False}

# ---- torch.save ----


loads("`torch.save` of a state dict", "model")(
    lambda folder: Sample(*saved(folder / "a.pt", network()[0].state_dict()))
)


loads("a state dict in the format before torch 1.6", "model", "structure")(
    lambda folder: Sample(*saved(folder / "a.pt", network()[0].state_dict(), **BEFORE_1_6))
)


loads("`torch.save` of model, optimizer and numbers", "model, optimizer")(
    lambda folder: run_sample(*saved(folder / "a.pth.tar", run_tree()))
)


loads("model, optimizer and numbers before torch 1.6", "model, optimizer", "structure")(
    lambda folder: run_sample(*saved(folder / "a.pth", run_tree(), **BEFORE_1_6))
)


@loads("tensors and numbers in one dict", "model")
def _(folder):
    numbers = {"epoch": 3, "lr": 0.5, "flag": True, "note": "n", "none": None}
    path, tree = saved(folder / "a.th", {"w": torch.ones(2), **numbers})
    return Sample(path, {"w": tree["w"]}, metadata=numbers)


@loads("model, optimizer, EMA, scheduler and generator", "model, optimizer, states ema, rng, sched")
def _(folder):
    model, _, scheduler = network()
    states = {"ema": model.state_dict(), "sched": scheduler.state_dict()}
    states["rng"] = torch.get_rng_state()
    path, tree = saved(folder / "a.tar", {**run_tree(), **states})
    return run_sample(path, tree)._replace(states={name: tree[name] for name in states})


@loads("tied and expanded tensors, bfloat16 and float8", "model")
def _(folder):
    base = torch.arange(6.0).reshape(2, 3)
    tree = {"tied": base, "same": base, "column": base[:, 1], "wide": torch.ones(1).expand(3)}
    tree |= {"half": base.bfloat16(), "small": base.to(torch.float8_e4m3fn), "none": base[:0]}
    return Sample(*saved(folder / "a.model", tree))


@loads("`optimizer.bin`: an optimizer alone", "optimizer")
def _(folder):
    path, tree = saved(folder / "optimizer.bin", network()[1].state_dict())
    return Sample(path, optimizer=moments(tree))


@loads("an 8-bit optimizer of bitsandbytes", "model, optimizer")
def _(folder):
    path = stored("bitsandbytes-optimizer", folder)  # its states are dicts
    return Sample(path, read_torch(path)["model"])


def arguments_of_transformers():
    from transformers import TrainingArguments

    return TrainingArguments("run", report_to=[], use_cpu=True)


for _title, _value, *_words in (
    ("a conjugated view", lambda: {"v": torch.tensor([1j]).conj()}, "'v'", "resolve_conj"),
    ("a meta tensor", lambda: {"w": torch.ones(2, device="meta")}, "'w'", "meta"),
    ("a sparse tensor", lambda: {"w": torch.eye(2).to_sparse()}, "'w'", "sparse"),
    ("a module", lambda: network()[0], "Sequential"),
    ("an `argparse.Namespace`", lambda: argparse.Namespace(lr=1e-3), "Namespace"),
    ("the arguments of transformers' Trainer", arguments_of_transformers, "TrainingArguments"),
):
    refused(f"`torch.save` of {_title}", "intact", *_words)(
        lambda folder, value=_value: saved(folder / "training_args.bin", value())[0]
    )


refused("a model quantized by torchao", "intact", "'0.weight'", "Int8Tensor")(
    lambda folder: stored("torchao", folder)
)


@refused("TorchScript", "unparsed", "TorchScript")
def _(folder):
    torch.jit.trace(network()[0], torch.ones(1, 3)).save(folder / "module.pt")
    return folder / "module.pt"


@refused("`torch.export` (`.pt2`)", "unparsed", "torch.export")
def _(folder):
    torch.export.save(torch.export.export(network()[0], (torch.ones(1, 3),)), folder / "a.pt2")
    return folder / "a.pt2"


# ---- safetensors, npz ----


@loads("safetensors of torch", "model", "structure")
def _(folder):
    from safetensors.torch import save_file

    path = folder / "a.safetensors"
    save_file(network()[0].state_dict(), path, {"note": "n"})
    return Sample(path, read_safetensors(path), metadata={"note": "n"})


@loads("safetensors named `pytorch_model.bin`", "model", "structure")
def _(folder):
    from safetensors.numpy import load_file, save_file

    save_file({"w": np.arange(6.0).reshape(2, 3), "n": np.array(3)}, folder / "pytorch_model.bin")
    return Sample(folder / "pytorch_model.bin", load_file(folder / "pytorch_model.bin"))


@loads("safetensors of mlx", "model", "structure")
def _(folder):
    import mlx.core as mx

    mx.save_safetensors(str(folder / "a.safetensors"), {"w": mx.ones((2, 3)), "n": mx.arange(3)})
    values = mx.load(str(folder / "a.safetensors"))
    return Sample(folder / "a.safetensors", {name: np.array(a) for name, a in values.items()})


@loads("`mlstate.save_file`", "model")
def _(folder):
    import mlstate

    mlstate.save_file({"w": np.arange(6.0).reshape(2, 3)}, folder / "a.safetensors")
    return Sample(folder / "a.safetensors", read_safetensors(folder / "a.safetensors"))


def npz(write, folder, **arrays):
    write(folder / "a.npz", **arrays)
    with np.load(folder / "a.npz", allow_pickle=True) as file:
        return Sample(folder / "a.npz", dict(file))


loads("`numpy.savez`", "model")(
    lambda folder: npz(np.savez, folder, w=np.arange(6.0).reshape(2, 3).T, n=np.array(3))
)


loads("`numpy.savez_compressed`", "model")(
    lambda folder: npz(np.savez_compressed, folder, w=np.ones((2, 3), np.float16))
)


@refused("`numpy.savez` of bfloat16 of ml_dtypes", "intact", "'w'", "bfloat16")
def _(folder):
    import ml_dtypes

    return npz(np.savez, folder, w=np.ones(2, ml_dtypes.bfloat16)).path


refused("`numpy.savez` of objects", "intact", "'w'", "object")(
    lambda folder: npz(np.savez, folder, w=np.array([{}, None], object)).path
)


# ---- formats that mlstate does not read ----

for _title, _name, _word in (
    ("GGUF", "gguf", "GGUF"),
    ("`.keras` of Keras", "keras", "Keras"),
    ("`.weights.h5` of Keras", "keras-weights", "HDF5"),
    ("`.h5` of Keras", "keras-h5", "HDF5"),
    ("ONNX", "onnx", "ONNX"),
    ("msgpack of flax", "flax", "flax"),
    ("joblib of scikit-learn", "scikit-learn", "pickle"),
):
    refused(_title, "unparsed", _word)(lambda folder, name=_name: stored(name, folder))


@refused("a bare pickle", "unparsed", "pickle")
def _(folder):
    (folder / "a.pkl").write_bytes(pickle.dumps({"w": np.ones(2)}))
    return folder / "a.pkl"


def nemo(path, mode):
    """Write an archive as NeMo does: the configuration and the weights of a model."""
    with tarfile.open(path, mode) as archive:
        for name in ("model_config.yaml", "model_weights.ckpt"):
            info = tarfile.TarInfo(f"./{name}")
            info.size = 4
            archive.addfile(info, io.BytesIO(b"a: 1"))
    return path


refused("`.nemo`, a tar archive", "unparsed", "tar")(lambda f: nemo(f / "a.nemo", "w"))
refused("a compressed tar archive", "unparsed", "gzip")(lambda f: nemo(f / "a.tar.gz", "w:gz"))

# ---- not a checkpoint, or damaged ----

LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 12345\n"
XET = f"# xet version 0\nfilesize = 12345\nhash = '{'ab' * 32}'\n"
HTML = "<!DOCTYPE html>\n<html><body>404</body></html>\n"
XML = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>\n'


def text_file(path, text):
    path.write_text(text, encoding="utf-8")
    return path


for _title, _name, _text, *_words in (
    ("a pointer of git-LFS", "a.safetensors", LFS, "git-lfs", "git lfs pull"),
    ("a pointer of Xet", "a.safetensors", XET, "Xet"),
    ("a page of HTML", "a.pt", HTML, "HTML"),
    ("an error in XML", "a.npz", XML, "AccessDenied"),
    ("an error in JSON", "a.bin", '{"error": "Repository not found"}\n', "Repository not found"),
    ("an empty file", "a.safetensors", "", "empty"),
    ("a file of zeros", "a.pt", "\0" * 4096, "zero bytes"),
    ("a text", "a.ckpt", "these are not weights\n", "text"),
):
    refused(_title, "damaged", *_words)(
        lambda folder, name=_name, text=_text: text_file(folder / name, text)
    )


def half(title, folder):
    path = KINDS[title].sample(folder).path
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


for _title, _whole in (
    ("safetensors cut short", "safetensors of torch"),
    ("`.npz` cut short", "`numpy.savez`"),
    ("a file of `torch.save` cut short", "`torch.save` of a state dict"),
    ("a file of torch before 1.6 cut short", "a state dict in the format before torch 1.6"),
):
    refused(_title, "damaged", "ends too early")(lambda folder, whole=_whole: half(whole, folder))

FILES = list(KINDS)  # titles
