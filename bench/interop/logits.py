"""Run one GGUF file in llama.cpp and save the logits of every position; runs in the interop environment.

    python logits.py MODEL.gguf TOKENS.npy LOGITS.npy

Caches are fp32 and flash attention is off, so that what remains is fp32 rounding.
"""

import ctypes
import sys

import llama_cpp
import numpy as np


def main(model_path: str, tokens_path: str, out: str) -> None:
    """Evaluate the tokens in one batch."""
    tokens = np.load(tokens_path)
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(model_path.encode(), params)
    if not model:
        sys.exit(f"llama.cpp cannot load {model_path}")
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 256
    settings.n_threads = settings.n_threads_batch = 2
    settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
    settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        sys.exit("llama.cpp cannot make a context")
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for n, token in enumerate(tokens):
        batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.seq_id[n][0] = int(token), n, 1, 0
        batch.logits[n] = 1
    if llama_cpp.llama_decode(context, batch):
        sys.exit("llama.cpp cannot decode the batch")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    rows = [
        np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, n), (vocabulary,)) for n in range(len(tokens))
    ]
    np.save(out, np.stack(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
