"""MLPs and mixtures of experts as parts of graphs."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

from engine.cpu.decoder.linear import Linear, base_of
from engine.cpu.onnx.graphs import CONTRIB, Graph, Unsupported
from engine.cpu.onnx.quantized import SameBits, of_all


class Gate(NamedTuple):
    """The gate of an MLP: the activation of one product times the other."""

    kind: Literal["silu", "gelu", "bounded"] = "silu"
    alpha: float = 1.0
    limit: float = 0.0

    @classmethod
    def of(cls, module: Any) -> Gate:
        match type(module).__name__:
            case "SwiGLU":
                return cls()
            case "SwigluOAI":
                return cls("bounded", module._alpha, module._limit)
        raise Unsupported(f"a {type(module).__name__} is not a supported gate")

    def add(self, graph: Graph, both: Linear, x: str) -> str:
        """Add the layers ``both`` for ``x``, the gate's input and the other factor side by side,
        and the gate: (rows, width)."""
        width = both.weight.shape[0] // 2
        gate, up = both.add_parts(graph, x, (width, width))
        if self.kind == "gelu":
            return graph.node("Mul", graph.node("Gelu", gate, approximate="tanh"), up)
        if self.kind == "bounded":  # gpt-oss's
            low, high = graph.number(-self.limit), graph.number(self.limit)
            gate = graph.node("Min", gate, high)
            up = graph.node("Max", graph.node("Min", up, high), low)
            up = graph.node("Add", up, graph.number(1))
        active = graph.node("QuickGelu", gate, domain=CONTRIB, alpha=self.alpha)
        return graph.node("Mul", active, up)


class Part(Protocol):
    """The interface of the second half of a layer."""

    owned: list[Any]
    """The modules that it computes."""
    same_bits: SameBits
    """The numbers of rows for which a row has the same bits."""

    def add(self, graph: Graph, x: str) -> str:
        """Return the result for ``x`` (rows, in): (rows, out)."""


class MLP:
    """An MLP with a gate."""

    def __init__(self, block: Any, gate: Gate) -> None:
        names = ["gate_up_proj"] if "gate_up_proj" in block else ["gate_proj", "up_proj"]
        inner = [block[name] for name in names]
        self._gate_up, self._gate, self._down = Linear.of(*inner), gate, Linear.of(block.down_proj)
        self.owned = [base_of(module) for module in (*inner, block.down_proj)]
        self.same_bits = of_all(each.weight.same_bits for each in (self._gate_up, self._down))

    def add(self, graph: Graph, x: str) -> str:
        return self._down.add(graph, self._gate.add(graph, self._gate_up, x))


class Experts:
    """A router and its experts.

    Rows are sorted by expert and divided at the first row of each, so that each product has all
    rows of its expert. Sorting, dividing and restoring the order are operations of the graph."""

    def __init__(self, block: Any) -> None:
        router, inner = (
            (block.router, block.experts) if "router" in block else (block.gate, block.switch_mlp)
        )
        self._chosen = int(getattr(block, "top_k", 0) or block.num_experts_per_tok)
        self._normalised = bool(getattr(block, "norm_topk_prob", True))
        self._gate = Gate.of(inner.activation)
        layers = [inner.gate_proj, inner.up_proj, inner.down_proj]
        self._router = Linear.of(router)
        self._gate_up, self._down = Linear.of_experts(*layers[:2]), Linear.of_experts(layers[2])
        self.owned = [base_of(module) for module in (router, *layers)]
        linears = [self._router, *self._gate_up, *self._down]
        # An expert may have an odd number of rows, regardless of the total.
        kept = all(each.weight.same_bits == "any" for each in linears)
        self.same_bits: SameBits = "any" if kept else "none"

    def add(self, graph: Graph, x: str) -> str:
        shares, chosen = self._choose(graph, x)
        sort, unsort, counts = self._order(graph, graph.node("Reshape", chosen, graph.integers(-1)))
        tokens = graph.node("Div", sort, graph.integers(self._chosen))
        parts = graph.nodes(
            "Split", graph.node("Gather", x, tokens), counts, outputs=len(self._down), axis=0
        )
        found = [
            down.add(graph, self._gate.add(graph, gate_up, part))
            for part, gate_up, down in zip(parts, self._gate_up, self._down, strict=True)
        ]
        back = graph.node("Gather", graph.node("Concat", *found, axis=0), unsort)
        width = self._down[0].weight.shape[0]
        back = graph.node("Reshape", back, graph.integers(-1, self._chosen, width))
        shares = graph.node("Unsqueeze", shares, graph.integers(2))
        return graph.node(
            "ReduceSum", graph.node("Mul", back, shares), graph.integers(1), keepdims=0
        )

    def _choose(self, graph: Graph, x: str) -> tuple[str, str]:
        """Return the weights and indices of the best experts of each row: (rows, chosen)."""
        scores = self._router.add(graph, x)
        if not self._normalised:
            scores = graph.node("Softmax", scores, axis=-1)
        best, chosen = graph.nodes("TopK", scores, graph.integers(self._chosen), outputs=2, axis=-1)
        return (graph.node("Softmax", best, axis=-1) if self._normalised else best), chosen

    def _order(self, graph: Graph, chosen: str) -> tuple[str, str, str]:
        """Return the order that sorts rows by expert, its inverse, and the number of rows per
        expert."""
        order = _sorted(graph, chosen)
        experts = graph.integers(*range(len(self._down)))
        same = graph.node("Equal", graph.node("Unsqueeze", chosen, graph.integers(1)), experts)
        counts = graph.node("Cast", same, to=7)  # int64
        return (
            order,
            _sorted(graph, order),
            graph.node("ReduceSum", counts, graph.integers(0), keepdims=0),
        )


def _sorted(graph: Graph, numbers: str) -> str:
    """Return the indices that sort ``numbers`` (n,) in ascending order."""
    count = graph.node("Shape", numbers)
    return graph.nodes("TopK", numbers, count, outputs=2, axis=0, largest=0)[1]


def mlp_of(block: Any, gate: Gate) -> Part:
    """Return the second half of the layer ``block``. ``gate`` is the gate of an MLP."""
    inner = block.block_sparse_moe if "block_sparse_moe" in block else block.mlp
    experts = "switch_mlp" in inner or "experts" in inner
    return Experts(inner) if experts else MLP(inner, gate)
