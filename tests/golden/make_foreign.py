"""Write tests/golden/foreign: files and folders of programs that the tests do not install.

Run it in an environment of requirements/test.txt and requirements/foreign.txt, which needs no GPU:
``python tests/golden/make_foreign.py [NAME...]``. It writes a zip file for each name, with the
files that the program writes into an empty folder.
"""

import io
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

os.environ.update(KERAS_BACKEND="torch", DS_ACCELERATOR="cpu", TF_CPP_MIN_LOG_LEVEL="3")
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
os.environ.update(MASTER_PORT="29511")
FOLDER = Path(__file__).parent / "foreign"
WRITERS: dict[str, Callable[[], object]] = {}


def writes(*names: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Mark a function that writes into the working directory, and is called with each name."""

    def mark(write: Callable[..., object]) -> Callable[..., object]:
        WRITERS.update({name: lambda name=name: write(name) for name in names})
        return write

    return mark


@writes("deepspeed-0", "deepspeed-1", "deepspeed-2", "deepspeed-3")
def write_deepspeed(name):
    import deepspeed
    import torch

    stage = int(name[-1])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model.register_buffer("seen", torch.ones(2))
    optimizer = torch.optim.AdamW(model.parameters())
    config = {
        "train_batch_size": 2,
        "bf16": {"enabled": stage > 0},
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(2):
        out = engine(torch.ones(2, 3, dtype=torch.bfloat16 if stage else torch.float32))
        engine.backward(out.float().sum())
        engine.step()
    engine.save_checkpoint("run", client_state={"epoch": 3})
    for script in Path("run").glob("*.py"):  # of DeepSpeed, 40 KB
        script.write_text("# a script of DeepSpeed\n", encoding="utf-8")


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=1, **sizes))


@writes("bitsandbytes-8", "bitsandbytes-4")
def write_bitsandbytes(name):
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    options = {"load_in_8bit": True} if name.endswith("8") else {"load_in_4bit": True}
    if "load_in_4bit" in options:
        options |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    with tempfile.TemporaryDirectory() as source:
        tiny_llama().save_pretrained(source)
        config = BitsAndBytesConfig(**options)
        model = LlamaForCausalLM.from_pretrained(source, quantization_config=config)
    model.save_pretrained("model")


@writes("bitsandbytes-optimizer")
def write_bitsandbytes_optimizer(name):
    import bitsandbytes
    import torch

    model = torch.nn.Linear(64, 128)
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "run.pt")


@writes("torchao")
def write_torchao(name):
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    quantize_(model, Int8WeightOnlyConfig())
    torch.save(model.state_dict(), "model.pt")


@writes("sentence-transformers")
def write_sentence_transformers(name):
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    with tempfile.TemporaryDirectory() as source:
        (Path(source) / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
        BertModel(BertConfig(vocab_size=6, num_hidden_layers=1, **sizes)).save_pretrained(source)
        BertTokenizer(f"{source}/vocab.txt").save_pretrained(source)
        modules = [models.Transformer(source), models.Pooling(8), models.Dense(8, 4)]
        SentenceTransformer(modules=modules).save("model")


@writes("keras", "keras-weights", "keras-h5")
def write_keras(name):
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    model.fit(np.ones((2, 3)), np.ones((2, 4)), verbose=0)
    file = {"keras": "m.keras", "keras-weights": "m.weights.h5", "keras-h5": "m.h5"}[name]
    (model.save_weights if name == "keras-weights" else model.save)(file)


@writes("orbax", "orbax-manager", "flax")
def write_jax(name):
    import flax.serialization
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    tree = {"params": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}}
    if name == "orbax":
        ocp.PyTreeCheckpointer().save(Path("step").absolute(), tree)
    elif name == "orbax-manager":
        with ocp.CheckpointManager(Path("run").absolute()) as manager:
            manager.save(3, args=ocp.args.StandardSave(tree))
    else:
        Path("flax_model.msgpack").write_bytes(flax.serialization.to_bytes(tree))


@writes("zarr-2", "zarr-3")
def write_zarr(name):
    import numpy as np
    import zarr

    group = zarr.open_group("run.zarr", mode="w", zarr_format=int(name[-1]))
    group.create_array("w", data=np.ones(3))


@writes("gguf")
def write_gguf(name):
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter("model.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.ones((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@writes("onnx")
def write_onnx(name):
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    weight = numpy_helper.from_array(np.ones(2, np.float32), "w")
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])
    node = helper.make_node("Identity", ["w"], ["y"])
    onnx.save(helper.make_model(helper.make_graph([node], "g", [], [output], [weight])), "m.onnx")


@writes("tensorflow-checkpoint", "tensorflow-saved-model")
def write_tensorflow(name):
    import tensorflow as tf

    module = tf.Module()
    module.w = tf.Variable(tf.ones([2, 2]))
    if name == "tensorflow-checkpoint":
        tf.train.Checkpoint(model=module).save("run/ckpt")
    else:
        tf.saved_model.save(module, "run")


@writes("scikit-learn")
def write_scikit_learn(name):
    import joblib
    from sklearn.linear_model import LinearRegression

    joblib.dump(LinearRegression().fit([[0.0], [1.0]], [0, 1]), "model.joblib")


def main(names):
    """Write the zip files of these names, or all."""
    home = Path.cwd()
    for name in names or WRITERS:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            WRITERS[name]()
            os.chdir(home)
            packed = io.BytesIO()
            with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
                for path in sorted(Path(folder).rglob("*")):
                    archive.write(path, path.relative_to(folder))
            (FOLDER / f"{name}.zip").write_bytes(packed.getvalue())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    main(sys.argv[1:])
