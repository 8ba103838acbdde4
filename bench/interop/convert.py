"""Run llama.cpp's own converter on a published-layout directory, without the vendor's tokenizer module.

    python convert.py LLAMA_CPP_SOURCE DIRECTORY OUT.gguf

The converter wants to run tokenizer code from the checkpoint; a miniature has none, so the vocabulary step is replaced
by the converter's own way of writing no vocabulary. Everything about the weights is untouched.
"""

import logging
import sys
from pathlib import Path


def main(source: str, directory: str, out: str) -> None:
    """Convert to fp32, MXFP4 experts repacked as they are."""
    sys.path[:0] = [source, f"{source}/gguf-py"]
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    logging.disable(logging.INFO)
    with torch.inference_mode():
        hparams = ModelBase.load_hparams(Path(directory), False)
        kind = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
        kind.set_vocab = lambda self: self._set_vocab_none()
        kind(Path(directory), gguf.LlamaFileType.ALL_F32, Path(out)).write()


if __name__ == "__main__":
    main(*sys.argv[1:])
