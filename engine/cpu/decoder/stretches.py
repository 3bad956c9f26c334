"""The stretches of a model between its attentions, each of them one call of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from engine.cpu.decoder.blocks import Norm, TransformerBlock, add_residual
from engine.cpu.decoder.rotary import Rotary
from engine.cpu.onnx.graphs import CONTRIB, Graph, Session
from engine.cpu.onnx.weights import Weight

ROWS = "rows"


class Head(NamedTuple):
    """The norm and the products after the last layer."""

    norm: Norm
    weight: Weight
    scale: float = 1  # that logits are multiplied by
    softcap: float | None = None

    def add(self, graph: Graph, normed: str) -> str:
        """Return the logits."""
        logits = self.weight.product(graph, normed)
        if self.scale != 1:
            logits = graph.node("Mul", logits, graph.number(self.scale))
        if self.softcap is not None:
            cap = graph.number(self.softcap)
            logits = graph.node("Tanh", graph.node("Div", logits, cap))
            logits = graph.node("Mul", logits, cap)
        return logits


def first(hidden: int, block: TransformerBlock, rotary: Rotary) -> Session:
    """Return the stretch from embeddings to the first attention.

    Inputs are x (tokens, hidden), and tables of `Rotary` if the layer has positions. Outputs are
    the residual (tokens, hidden), queries (tokens, heads * dim), keys and values likewise."""
    graph = Graph()
    x = graph.input("x", ROWS, hidden)
    normed = x if block.before_attention is None else block.before_attention.add(graph, x)
    _add_projections(graph, graph.node("Identity", x), normed, block, rotary)
    return graph.session()


def between(
    hidden: int,
    before: TransformerBlock,
    after: TransformerBlock,
    rotary: Rotary,
    *,
    adds: bool = False,
) -> Session:
    """Return the stretch from the attention of one layer to that of the next.

    Inputs are x, what attention found (tokens, heads * value dim), with ``adds`` what is added to
    the layer's output (tokens, hidden), and tables."""
    graph = Graph()
    normed = after.before_attention
    x, normed_x = _add_to_the_end(graph, hidden, before, normed, adds=adds)
    _add_projections(graph, x, normed_x, after, rotary)
    return graph.session()


def last(hidden: int, before: TransformerBlock, head: Head) -> Session:
    """Return the stretch from the last attention to the logits (tokens, vocabulary)."""
    graph = Graph()
    _, normed = _add_to_the_end(graph, hidden, before, head.norm)
    graph.output(head.add(graph, normed), ROWS, head.weight.shape[0])
    return graph.session()


def last_states(hidden: int, before: TransformerBlock, norm: Norm) -> Session:
    """Return the stretch from the last attention to the hidden states (tokens, hidden)."""
    graph = Graph()
    _, normed = _add_to_the_end(graph, hidden, before, norm)
    graph.output(normed, ROWS, hidden)
    return graph.session()


def _add_to_the_end(
    graph: Graph, hidden: int, block: TransformerBlock, norm: Norm | None, *, adds: bool = False
) -> tuple[str, str]:
    """Add a layer after its attention. Return the residual, and the same under ``norm``."""
    x = graph.input("x", ROWS, hidden)
    found = graph.input("found", ROWS, block.out.weight.shape[1])
    x, normed = add_residual(graph, x, block.add_attention_out(graph, found), block.before_mlp)
    made = block.add_mlp(graph, normed)
    if adds:
        made = graph.node("Add", made, graph.input("added", ROWS, hidden))
    return add_residual(graph, x, made, norm)


def _add_projections(
    graph: Graph, x: str, normed: str, block: TransformerBlock, rotary: Rotary
) -> None:
    """Add queries, keys and values as outputs, scaled and rotated."""
    dim = block.head_dim
    rotate = rotation(graph, dim, rotary)
    widths = block.heads * dim, block.kv_heads * dim
    queries, keys, values = block.qkv.add_parts(graph, normed, (*widths, widths[1]))
    if block.head_norms:
        queries = block.head_norms[0].add_heads(graph, queries, widths[0])
        keys = block.head_norms[1].add_heads(graph, keys, widths[1])
    queries, keys = rotate(queries, block.heads), rotate(keys, block.kv_heads)
    if block.scale != 1:
        queries = graph.node("Mul", queries, graph.number(block.scale))
    graph.output(x, ROWS, "hidden")
    for value, size in ((queries, widths[0]), (keys, widths[1]), (values, widths[1])):
        graph.output(value, ROWS, size)


def rotation(graph: Graph, dim: int, rotary: Rotary) -> Callable[[str, int], str]:
    """Return a function that rotates (tokens, heads * dim) in ``graph``."""
    if not rotary.turned:
        return lambda x, heads: x
    half = rotary.turned // 2
    cosines, sines = (graph.input(name, ROWS, half) for name in ("cosines", "sines"))
    first = graph.integers(0)  # row i of the tables is that of token i

    def rotate(x: str, heads: int) -> str:
        together = graph.node("Reshape", x, graph.integers(1, -1, heads * dim))
        turned = graph.node(
            "RotaryEmbedding",
            together,
            first,
            cosines,
            sines,
            domain=CONTRIB,
            interleaved=int(rotary.neighbours),
            num_heads=heads,
            rotary_embedding_dim=rotary.turned if rotary.turned < dim else 0,
        )
        return graph.node("Reshape", turned, graph.integers(-1, heads * dim))

    return rotate
