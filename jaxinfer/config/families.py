"""What each family of models is made of and what works with it: the table that `jaxinfer models` and docs/architecture.md show."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFacts:
    """One row.

    Attributes:
      models: names that people know, each with the model_type of its config.json.
      checkpoints: kinds of files that are read.
      images: "yes", or why not.
      tp, ep: tensor and expert parallelism; "–" where there is nothing to split.
    """

    models: tuple[tuple[str, tuple[str, ...]], ...]
    checkpoints: str
    attention: str
    feed_forward: str
    images: str = "–"
    tp: str = "yes"
    ep: str = "–"

    @property
    def model_types(self) -> tuple[str, ...]:
        return tuple(kind for _, kinds in self.models for kind in kinds)

    @property
    def cells(self) -> tuple[str, ...]:
        """All but the models."""
        return self.checkpoints, self.attention, self.feed_forward, self.images, self.tp, self.ep


_GGUF = "safetensors, GGUF, Orbax"

FAMILIES = (
    FamilyFacts(
        models=(("Llama, SmolLM", ("llama",)), ("Mistral", ("mistral",))),
        checkpoints=_GGUF,
        attention="full; sliding, pages given back",
        feed_forward="dense",
    ),
    FamilyFacts(
        models=(("Qwen 3", ("qwen3", "qwen3_moe")),),
        checkpoints=_GGUF,
        attention="full or sliding, normed queries and keys",
        feed_forward="dense, mixture",
        ep="yes",
    ),
    FamilyFacts(
        models=(("Gemma 3 text", ("gemma3_text", "gemma3")),),
        checkpoints="safetensors, Orbax",
        attention="5 sliding : 1 full, two rotations",
        feed_forward="dense",
        images="left out",
    ),
    FamilyFacts(
        models=(("Llama 4", ("llama4_text", "llama4")),),
        checkpoints="safetensors, Orbax",
        attention="3 chunked : 1 full without rotation",
        feed_forward="mixture with a shared expert",
        images="yes",
        ep="yes",
    ),
    FamilyFacts(
        models=(("DeepSeek-V3, R1", ("deepseek_v3",)), ("Kimi K2", ("kimi_k2",)), ("K2.5", ("kimi_k25",))),
        checkpoints="safetensors: bfloat16, FP8 blocks (spread out into bfloat16), INT4 packed (kept); Orbax",
        attention="MLA",
        feed_forward="mixture, groups, shared experts",
        images="K2.5",
        tp="yes, each device its own requests' latents (with pp all)",
        ep="yes",
    ),
)


def markdown_table() -> str:
    """The table of docs/architecture.md; a test compares the two."""
    head = ("family (`model_type`)", "checkpoints", "attention", "feed-forward", "images", "tp", "ep")
    rows = [(_named(family), *family.cells) for family in FAMILIES]
    first, *rest = ("| " + " | ".join(row) + " |" for row in (head, *rows))
    return "\n".join((first, "|" + "---|" * len(head), *rest))


def _named(family: FamilyFacts) -> str:
    return ", ".join(f"{name} ({', '.join(f'`{kind}`' for kind in kinds)})" for name, kinds in family.models)
