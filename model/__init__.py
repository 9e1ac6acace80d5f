"""A rank's model: from a Hugging Face folder to the tokens of a step.

| room | reason to change | may import |
|---|---|---|
| `config` | what a folder says: config.json and the files beside it; no torch | |
| `checkpoint` | the tensors that a folder and its adapters hold; no torch | `config` |
| `batch_invariance` | which products give a row the same result in every batch | `layers` |
| `layers` | the computation of one layer, and the devices it runs on | `config` |
| `loading` | tensors from files, sliced for a rank, quantized or adapted | `checkpoint`, `layers` |
| `transformers_code` | decoders that transformers' own code computes | `loading` |
| `sampling` | tokens from logits | |
| `runner` | one rank: its KV pool, and its steps | all above |
| `executors` | threads and processes that run ranks for a node | `runner` |

`tensor_parallel.py` is how the layers of one rank reach those of the others. This room knows
neither routers nor requests.
"""
