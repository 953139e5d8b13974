"""The paged KV cache: who owns which page (pages), what it holds (prefix), what sequences need (manager)."""
