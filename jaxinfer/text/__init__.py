"""Text in and out: tokenizers, chat templates, incremental detokenizing. No JAX in here."""
