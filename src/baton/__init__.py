"""baton: disaggregated prefill/decode serving for large language models."""
