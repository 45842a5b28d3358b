"""Products that language models compute, drawn at random: weights, shards of them, any number of tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from cutegen.families.gemm.problem import Problem

__all__ = ["KINDS", "Model", "draw", "weights"]

#: Ways in which tensor parallelism cuts a weight.
SHARDS = (1, 2, 4, 8)
#: What a line of the benchmark may ask beside sizes, by its name in results.
KINDS = {
    "bf16 kk": "bf16 kk",
    "bf16 kn": "bf16 kn",
    "bf16 mn": "bf16 mn",
    "fp16 kk": "fp16 kk",
    "bf16 kk bias": "bf16 kk bias=n",
    "bf16 kk bias silu": "bf16 kk bias=n act=silu",
    "bf16 mk": "bf16 mk",
    "bf16 kk beta": "bf16 kk beta",
    "bf16 kk odd n": "bf16 kk",
}
#: Sizes that TMA takes are multiples of so many elements of two bytes.
_ALIGNED = 8


@dataclass(frozen=True)
class Model:
    """What decides the weights of a transformer.

    Attributes:
        name: Whose configuration it is.
        hidden: Elements of a token between layers.
        heads: Query heads; 0 leaves the projections of attention out.
        kv_heads: Heads of keys and of values.
        head_dim: Elements of a head.
        ffn: Widths of feed-forward layers.
        vocabulary: Rows of the embedding.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: tuple[int, ...]
    vocabulary: int

    def products(self) -> Iterator[tuple[int, int]]:
        """Yield (n, k) of every weight and of its shards."""
        for shards in SHARDS:
            if self.heads:
                kept = max(shards, self.kv_heads)  # no rank has less than one head of keys
                yield (self.heads + 2 * kept) * self.head_dim // shards, self.hidden
                yield self.hidden, self.heads * self.head_dim // shards
            for width in self.ffn:
                yield 2 * width // shards, self.hidden
                yield self.hidden, width // shards
            yield self.vocabulary // shards, self.hidden


#: Source: the models' published ``config.json``.
MODELS = (
    Model("Llama 3 8B", 4096, 32, 8, 128, (14336,), 128256),
    Model("Llama 3 70B", 8192, 64, 8, 128, (28672,), 128256),
    Model("Llama 3 405B", 16384, 128, 8, 128, (53248,), 128256),
    Model("Llama 4 Scout", 5120, 40, 8, 128, (8192, 16384), 202048),
    Model("Qwen3 8B", 4096, 32, 8, 128, (12288,), 151936),
    Model("Qwen3 32B", 5120, 64, 8, 128, (25600,), 151936),
    Model("Qwen3 30B-A3B", 2048, 32, 4, 128, (768,), 151936),
    Model("Qwen3 235B-A22B", 4096, 64, 4, 128, (1536,), 151936),
    Model("Mixtral 8x22B", 6144, 48, 8, 128, (16384,), 32768),
    Model("DeepSeek-V3", 7168, 0, 0, 0, (18432, 2048), 129280),
    Model("gpt-oss", 2880, 64, 8, 64, (2880,), 201088),
    Model("Gemma 3 27B", 5376, 32, 16, 128, (21504,), 262208),
)


def weights() -> list[tuple[int, int]]:
    """Return the different (n, k) of all models, in order; those that TMA cannot take are left out."""
    found = {product for model in MODELS for product in model.products()}
    return sorted(pair for pair in found if all(size % _ALIGNED == 0 and size >= 256 for size in pair))


def draw(kind: str, count: int, seed: int, rows: tuple[int, int] = (1, 8192)) -> list[Problem]:
    """Return ``count`` different problems of a kind, the same for the same seed.

    Args:
        kind: A name of :data:`KINDS`.
        count: How many.
        seed: Of the draw.
        rows: First and last m; its logarithm is spread evenly.
    """
    rng, pairs = random.Random(f"{seed} {kind}"), weights()
    found: dict[Problem, None] = {}
    while len(found) < count:
        n, k = rng.choice(pairs)
        m = round(2 ** rng.uniform(math.log2(rows[0]), math.log2(rows[1])))
        if " m" in kind:  # A is contiguous along m there, which TMA wants aligned
            m = max(_ALIGNED, m - m % _ALIGNED)
        if kind.endswith("odd n"):  # rows of D are not aligned for TMA, so each element is stored alone
            n -= 1
        found[Problem.parse(f"gemm {m}x{n}x{k} {KINDS[kind]}")] = None
    return list(found)
