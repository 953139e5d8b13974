"""A family for tests whose layers look back in turns over everything and over a window: two page groups that share one cache."""

from __future__ import annotations

from jaxinfer.kv.pages import PageGroup
from jaxinfer.models import llama
from jaxinfer.models.layers.rope import inverse_frequencies, rope_tables

WINDOW = 12
config_from_hf = llama.config_from_hf


class Alternating(llama.Llama):
    def __init__(self, config, **options):
        super().__init__(config, **options)
        for i, layer in enumerate(self.layers):
            layer.attention.group = i % 2
            layer.attention.window = WINDOW if i % 2 else None

    @property
    def page_groups(self):
        return (PageGroup("full"), PageGroup("sliding", WINDOW))

    def __call__(self, tokens, batch, cache, *, record=None):
        rope = rope_tables(batch.positions, *inverse_frequencies(self.config.rope, self.config.head_dim))
        x = self.embed(tokens).astype(self.compute_dtype)
        pages = list(cache)
        for i, layer in enumerate(self.layers):
            x, pages[i // 2] = layer(x, rope, batch, pages[i // 2])
        return self.norm(x), tuple(pages)
