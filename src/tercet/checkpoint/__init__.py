"""Published checkpoints: read, verify, convert, write — strictly, and one shard at a time.

| file | what it knows |
|---|---|
| `weights` | every weight of a `ModelConfig`, its published name and shape (checkpoint.md §3, §9) |
| `layouts` | how a layout stores a weight: prefix, dtypes, MXFP4 pairs, padding, shard |
| `published_config` | ``config.json`` of either layout, to and from `ModelConfig` |
| `vision` | names and shapes of the vision tower, which is carried without being read |
| `headers` | safetensors headers, read as if an enemy had written them |
| `directory` | a checkpoint directory: index, headers, strict comparison with the layout, mapped tensors |
| `writer` | shards and index, streamed, published by one rename |
| `mxfp4` | the 4-bit codec |
| `convert` | directory or model → directory |
| `load` | directory → model |
| `inspection`, `comparison` | what ``tercet checkpoint inspect`` and ``compare`` print |
| `miniature` | layout-exact random checkpoints |
| `gguf` | export for llama.cpp |
"""
