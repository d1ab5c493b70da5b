"""Folders as ANEMLL writes them: chunks of a model, compiled or not, and a meta.yaml."""

import json

from mlpackage_writer import spec_bytes, state, write_package

STATE = "model_model_kv_cache_0"
TIMES = " \N{MULTIPLICATION SIGN} "


def schema(name, shape, kind="State"):
    """An input, output or state as Core ML's compiler lists it in metadata.json."""
    return {
        "dataType": "Float16",
        "isOptional": "0",
        "formattedType": f"{kind} (Float16 {TIMES.join(map(str, shape))})",
        "shortDescription": "",
        "shape": str(list(shape)),
        "name": name,
        "type": kind,
    }


def compiled_document(functions, default=None):
    """The metadata.json of a model; `functions` has shapes of states by name, by function."""

    def described(states):
        return {
            "computePrecision": "Mixed (Float16, Int32)",
            "outputSchema": [schema("output_hidden_states", (1, 1, 64), "MultiArray")],
            "stateSchema": [schema(name, shape) for name, shape in states.items()],
            "mlProgramOperationTypeHistogram": {"Ios18.readState": 2, "Ios18.matmul": 8},
            "inputSchema": [schema("hidden_states", (1, 1, 64), "MultiArray")],
        }

    default = default or next(iter(functions))
    model = {
        "metadataOutputVersion": "3.0",
        "modelParameters": [],
        "specificationVersion": 9,
        "functions": [described(states) | {"name": name} for name, states in functions.items()],
        **described(functions[default]),
        "storagePrecision": "Mixed (Float16, Palettized (6 bits))",
        "isUpdatable": "0",
        "availability": {"macOS": "15.0", "iOS": "18.0"},
        "modelType": {"name": "MLModelType_mlProgram"},
        "defaultFunctionName": default,
        "generatedClassName": "qwen_FFN_PF_lut6_chunk_01of02",
        "userDefinedMetadata": {"com.github.apple.coremltools.version": "9.0"},
        "method": "predict",
    }
    return [model]


def write_compiled(folder, functions, default=None):
    """A .mlmodelc folder with the files of one, whose program and weights are not real."""
    for name in ("analytics/coremldata.bin", "weights/weight.bin", "coremldata.bin", "model.mil"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"not read")
    document = json.dumps(compiled_document(functions, default), indent=2, ensure_ascii=False)
    (folder / "metadata.json").write_text(document, encoding="utf-8")
    return folder


def write_uncompiled(folder, functions, default=None):
    """A .mlpackage folder with the same states."""
    described = [
        (name, [state(label, shape) for label, shape in states.items()])
        for name, states in functions.items()
    ]
    data = spec_bytes(functions=described, default=default or next(iter(functions)))
    return write_package(folder, data)


# A meta.yaml as generate_meta_yaml.py of ANEMLL 0.3.5 prints it.
PRINTED_META = """model_info:
  name: anemll-Qwen-Qwen3-0.6B-ctx{context}
  version: 0.3.5
  description: |
    Demonstarates running Qwen-Qwen3-0.6B on Apple Neural Engine
    Context length: {context}
    Batch size: 64
    Chunks: {chunks}
  license: MIT
  author: Anemll
  framework: Core ML
  language: Python
  architecture: qwen3
  parameters:
    context_length: {context}
    batch_size: 64
    lut_embeddings: none
    lut_ffn: 6
    lut_ffn_per_channel: 4
    lut_lmhead: 6
    num_chunks: {chunks}
    model_prefix: qwen
    embeddings: qwen_embeddings.mlmodelc
    lm_head: qwen_lm_head_lut6.mlmodelc
    ffn: qwen_FFN_PF_lut6_chunk_01of{chunks:02d}.mlmodelc
    split_lm_head: 16

# =============================================================================
# Conversion Parameters (for troubleshooting)
# command_line: ./anemll/utils/convert_model.sh --context {context} --chunk {chunks}
"""


def write_single_context(folder, context, chunks=2, write=write_compiled, layers=4):
    """The folder of one conversion: functions infer and prefill of one context."""
    states = {STATE: (2 * layers, 1, context, 32)}
    folder.mkdir(parents=True, exist_ok=True)
    extension = "mlmodelc" if write is write_compiled else "mlpackage"
    for i in range(1, chunks + 1):
        name = f"qwen_FFN_PF_lut6_chunk_{i:02d}of{chunks:02d}.{extension}"
        write(folder / name, {"infer": states, "prefill": states})
    for name in ("qwen_embeddings", "qwen_lm_head_lut6"):
        write(folder / f"{name}.{extension}", {"main": {}})
    (folder / "meta.yaml").write_text(PRINTED_META.format(context=context, chunks=chunks))
    return folder


def write_combined(folder, contexts, chunks=2, write=write_compiled, layers=4):
    """The folder of combine_state_transition_contexts.py: a function for each context."""
    functions = {
        f"{role}_ctx{context}": {STATE: (2 * layers, 1, context, 32)}
        for role in ("infer", "prefill")
        for context in contexts
    }
    folder.mkdir(parents=True, exist_ok=True)
    extension = "mlmodelc" if write is write_compiled else "mlpackage"
    for i in range(1, chunks + 1):
        name = f"qwen_FFN_PF_statex_chunk_{i:02d}of{chunks:02d}.{extension}"
        write(folder / name, functions)
    largest = max(contexts)
    # yaml.safe_dump(meta, sort_keys=False) writes lists and mappings as blocks
    text = PRINTED_META.format(context=largest, chunks=chunks).partition("\n#")[0]
    text = text.replace("FFN_PF_lut6", "FFN_PF_statex")
    text += f"""    state_transition_infer_contexts:
{"".join(f"    - {context}{chr(10)}" for context in contexts)}\
    state_transition_infer_function_template: infer_ctx{{context}}
    state_transition_infer_default_function: infer_ctx{largest}
    state_transition_prefill_context: {largest}
    state_transition_no_alias_functions: true
    state_transition_chunk1_infer_kinds:
      '{largest}': FFN_PF
"""
    (folder / "meta.yaml").write_text(text)
    return folder
