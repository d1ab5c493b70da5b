"""Models of transformers with random weights: small, of several architectures, tied or not."""

import warnings


def small_models():
    """Return functions that build a model, by a short name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers as tf

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = {**sizes, "vocab_size": 96, "intermediate_size": 64, "num_key_value_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return {
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**llama, **ends)),
        "llama-tied": lambda: tf.LlamaForCausalLM(
            tf.LlamaConfig(**llama, **ends, tie_word_embeddings=True)
        ),
        "gpt2": lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=16, **ends)
        ),
        "bert": lambda: tf.BertForMaskedLM(
            tf.BertConfig(**sizes, vocab_size=96, intermediate_size=64, max_position_embeddings=16)
        ),
        "t5": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        ),
    }
