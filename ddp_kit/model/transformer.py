"""Parameters and FLOPs of a transformer, from its sizes.

Sources: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (2021), https://arxiv.org/abs/2104.04473, for both formulas; Chowdhery et al., "PaLM"
(2022), https://arxiv.org/abs/2204.02311, appendix B, for the FLOPs without recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_kit.errors import ModelError
from ddp_kit.model.communication import check_count


@dataclass(frozen=True)
class Transformer:
    """A decoder-only transformer, from its sizes.

    layers, heads: as in GPT. width: of what goes from layer to layer. vocabulary: tokens. context:
    tokens in a sequence. kv_heads: heads of keys and values, if queries share them; None: as many
    as heads. inner: numbers between the two matrices of the MLP; None: 4 * width. gated: the MLP
    has a third matrix, as in Llama. tied: the last layer uses the embedding. positions: they are
    learned, one vector for each. linear_bias, norm_bias: what has a bias. dropout: the layer has
    two dropouts, and one more on the attention scores; a mask takes a byte for each number.

    Raises ModelError for sizes that no transformer has.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    kv_heads: int | None = None
    inner: int | None = None
    gated: bool = False
    tied: bool = True
    positions: bool = True
    linear_bias: bool = True
    norm_bias: bool = True
    dropout: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary", "context"):
            check_count(name, getattr(self, name))
        check_count("kv_heads", self.key_value_heads)
        check_count("inner", self.mlp_width)
        if self.width % self.heads:
            raise ModelError(f"width must be a multiple of heads={self.heads}, got {self.width}")
        if self.heads % self.key_value_heads:
            wanted = f"a multiple of kv_heads={self.kv_heads}"
            raise ModelError(f"heads must be {wanted}, got {self.heads}")

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def mlp_width(self) -> int:
        """Numbers between the two matrices of the MLP."""
        return 4 * self.width if self.inner is None else self.inner

    @property
    def kv_width(self) -> int:
        """Numbers in the keys of a token, and as many in its values."""
        return self.width // self.heads * self.key_value_heads

    @property
    def layer_weights(self) -> int:
        """Parameters in the matrices of a layer."""
        attention = 2 * self.width * (self.width + self.kv_width)
        return attention + (2 + self.gated) * self.width * self.mlp_width

    @property
    def layer_vectors(self) -> int:
        """Parameters of a layer outside its matrices: of two norms, and biases."""
        biases = 3 * self.width + 2 * self.kv_width + (1 + self.gated) * self.mlp_width
        return 2 * self._norm + self.linear_bias * biases

    @property
    def embeddings(self) -> int:
        """Parameters before the first layer."""
        return (self.vocabulary + self.positions * self.context) * self.width

    @property
    def head(self) -> int:
        """Parameters of the matrix after the last layer, which may be the embedding's."""
        return self.vocabulary * self.width

    @property
    def _norm(self) -> int:
        return (1 + self.norm_bias) * self.width

    @property
    def parameters(self) -> int:
        """All parameters; a tied matrix counts once."""
        layers = self.layers * (self.layer_weights + self.layer_vectors)
        return layers + self.embeddings + self._norm + (not self.tied) * self.head

    @property
    def scores_flops(self) -> int:
        """FLOPs per token for the attention scores of a layer and their product with the values.

        Scores of later tokens count, as in the sources, though a causal kernel may skip them.
        """
        return 4 * self.context * self.width

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward per token, without recomputation.

        Two for each parameter in a matrix, and the scores; backward takes twice as many.
        """
        layer = 2 * self.layer_weights + self.scores_flops
        return 3 * (self.layers * layer + 2 * self.head)


_LLAMA = {"gated": True, "tied": False, "positions": False}
_LLAMA |= {"linear_bias": False, "norm_bias": False}
# Llama 3, Grattafiori et al. (2024), https://arxiv.org/abs/2407.21783, table 3.
LLAMA_8B = Transformer(32, 4096, 32, 128256, 8192, kv_heads=8, inner=14336, **_LLAMA)
LLAMA_70B = Transformer(80, 8192, 64, 128256, 8192, kv_heads=8, inner=28672, **_LLAMA)
LLAMA_405B = Transformer(126, 16384, 128, 128256, 8192, kv_heads=8, inner=53248, **_LLAMA)
