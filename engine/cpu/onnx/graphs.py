"""ONNX Runtime graphs built in memory: the matrix library on CPUs.

ONNX Runtime packs constant weights once, when a session is created. A product of 2 to 16 rows then
takes little longer than reading the weights, while a BLAS packs them in every call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.backend.threads import num_threads

logger = logging.getLogger(__name__)

OPSET, IR_VERSION = 21, 10
CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

SPIN_US = 10
"""Microseconds that threads spin for more work before they sleep: about until the next product of a
session begins. Waking a thread takes longer."""

_CHECKED_ROWS = (1, 2, 3, 5, 8, 13, 16, 33, 129, 256)
_CHECKED_SHAPE = 272, 600
"""ONNX Runtime accumulates products over 256 columns at a time."""


_making = Lock()
_scratch: dict[tuple[int, ...], Any] = {}
"""Values returned by `_lent`, by number and shape; a session reads them while it is created."""


class Unsupported(Exception):
    """The model cannot be computed here. The message is the reason."""


class Session:
    """A graph that is ready to run. One with several threads must be the only one running."""

    def __init__(
        self, session: Any, inputs: Sequence[_Declared], parts: Sequence[Any] = ()
    ) -> None:
        self._session = session
        self.parts = parts
        """Parts of the graph with inputs by name."""
        self._inputs = tuple(inputs)
        self._names = [one.name for one in inputs if not one.by_name]
        self._outputs = [output.name for output in session.get_outputs()]

    def __call__(self, *inputs: Any, named: Mapping[str, Any] = MappingProxyType({})) -> list[Any]:
        """Return the outputs for ``inputs``, in the order of their declaration, and for inputs
        by name."""
        feeds = {**dict(zip(self._names, inputs, strict=True)), **named}
        found: list[Any] = self._session.run(self._outputs, feeds)
        return found

    def bound(self) -> Bound:
        """Return arguments that are kept between calls."""
        return Bound(self._session, self._names, self._outputs)

    def zeros(self, size: int) -> list[NDArray[Any]]:
        """Return inputs of zeros, with ``size`` for dynamic dimensions. For measurements."""
        return [
            np.zeros([dim if isinstance(dim, int) else size for dim in one.dims], one.dtype)
            for one in self._inputs
            if not one.by_name
        ]


class Bound:
    """Arguments of a session bound to memory, including outputs. Used by one thread at a time.

    Nothing is copied or allocated, and a call takes 10 microseconds instead of 50. The memory must
    stay valid as long as calls use it."""

    def __init__(self, session: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._inputs, self._outputs = inputs, outputs

    def input(self, number: int, kind: Any, shape: Sequence[int], address: int) -> None:
        """Bind input ``number`` to ``address``."""
        self._binding.bind_input(self._inputs[number], "cpu", 0, kind, shape, address)

    def output(self, number: int, kind: Any, shape: Sequence[int], address: int) -> None:
        """Bind output ``number`` to ``address``."""
        self._binding.bind_output(self._outputs[number], "cpu", 0, kind, shape, address)

    def shared_input(self, number: int, argument: Shared) -> None:
        """Bind input ``number`` to an ``argument``."""
        self._binding.bind_ortvalue_input(self._inputs[number], argument.value)

    def shared_output(self, number: int, argument: Shared) -> None:
        """Bind output ``number`` to an ``argument``."""
        self._binding.bind_ortvalue_output(self._outputs[number], argument.value)

    def __call__(self) -> None:
        self._session.run_with_iobinding(self._binding)


class Shared:
    """An array to which several `Bound` bind the same argument: faster than by its address."""

    def __init__(self, array: NDArray[Any]) -> None:
        import onnxruntime

        if not array.flags.c_contiguous:  # it would be copied
            raise ValueError("the array is not contiguous")
        self.value = onnxruntime.OrtValue.ortvalue_from_numpy(array)


class _Declared(NamedTuple):
    """An input or an output."""

    name: str
    dims: tuple[int | str, ...]
    dtype: Any
    by_name: bool = False


class Graph:
    """Builds one graph. Values are identified by the strings that the methods return."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._inputs: list[_Declared] = []
        self._outputs: list[_Declared] = []
        self._constants: dict[str, NDArray[Any]] = {}
        self._packed: list[str] = []  # names of constants
        self._count = 0
        self.parts: list[Any] = []
        """Objects that provide inputs by name, for callers of the session."""

    def input(
        self, name: str, *dims: int | str, dtype: Any = np.float32, by_name: bool = False
    ) -> str:
        """Declare an input. A dimension given as a string is dynamic."""
        self._inputs.append(_Declared(name, dims, dtype, by_name))
        return name

    def has_input(self, name: str) -> bool:
        return any(one.name == name for one in self._inputs)

    def choose(self, condition: str, then: Callable[[], str], otherwise: str) -> str:
        """Return the result of ``then`` if ``condition``, an input, is true, else ``otherwise``."""
        from onnx import TensorProto, helper

        outer, branches = self._nodes, []
        for add in (then, lambda: self.node("Identity", otherwise)):
            self._nodes = []
            found = helper.make_tensor_value_info(add(), TensorProto.FLOAT, None)
            branches.append(helper.make_graph(self._nodes, "branch", [], [found]))
        self._nodes = outer
        return self.node("If", condition, then_branch=branches[0], else_branch=branches[1])

    def output(self, value: str, *dims: int | str, dtype: Any = np.float32) -> None:
        """Declare ``value`` as the next output."""
        self._outputs.append(_Declared(value, dims, dtype))

    def constant(self, array: NDArray[Any], *, packed: bool = False) -> str:
        """Return the name of a constant. Its memory is read when the session is created.

        The session keeps a copy unless an operator packs it. Some operators pack a constant but
        keep the original too: with ``packed`` it is not kept, and reading it later would return
        garbage."""
        name = self._name("constant")
        self._constants[name] = np.ascontiguousarray(array)
        if packed:
            self._packed.append(name)
        return name

    def integers(self, *numbers: int) -> str:
        """Return the name of a constant vector, for the arguments of shapes and slices."""
        return self.constant(np.array(numbers, np.int64))

    def number(self, value: float) -> str:
        """Return the name of a constant number."""
        return self.constant(np.array([value], np.float32))

    def node(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add an operator with one output, and return the output's name."""
        return self.nodes(op, *inputs, outputs=1, domain=domain, **attributes)[0]

    def nodes(
        self, op: str, *inputs: str, outputs: int, domain: str = "", **attributes: Any
    ) -> list[str]:
        """Add an operator and return the names of its ``outputs``."""
        from onnx import helper

        names = [self._name(op) for _ in range(outputs)]
        self._nodes.append(helper.make_node(op, inputs, names, domain=domain, **attributes))
        return names

    def drop_unused(self) -> None:
        """Remove operators whose results nothing uses. ONNX Runtime would compute them. Not for
        graphs with `choose`, whose branches use results too."""
        used = {one.name for one in self._outputs}
        kept = []
        for node in reversed(self._nodes):
            if not used.isdisjoint(node.output):
                kept.append(node)
                used.update(node.input)
        self._nodes = kept[::-1]

    def session(self, threads: int | None = None, *, in_order: bool = False) -> Session:
        """Return the graph as a session with ``threads``, by default one per core.

        With ``in_order`` nodes are computed in the order in which they were added, otherwise from
        the last input of each node to its first. The graph must not be used afterwards."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or num_threads()
        options.inter_op_num_threads = 1
        if in_order:
            options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        # Each session has its own threads. Dozens of pools that spin for long would take all cores
        # from attention and from the router.
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
        # Otherwise each session keeps the memory of its longest pass. The heap keeps it once for
        # all.
        options.enable_cpu_mem_arena = False
        # A single block for everything in a call has a different size for each shape of inputs,
        # finds no room in the heap, and new pages cost milliseconds.
        options.enable_mem_pattern = False
        options.log_severity_level = 3  # only errors
        large = {name: array for name, array in self._constants.items() if array.nbytes > 1024}
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in large.values()]
        options.add_external_initializers(list(large), values)
        with _making:
            for number, name in enumerate(name for name in self._packed if name in large):
                options.add_initializer(name, _lent(large[name], number))
            made = onnxruntime.InferenceSession(
                self._model(large), options, providers=["CPUExecutionProvider"]
            )
        self._constants.clear()
        return Session(made, self._inputs, self.parts)

    def _model(self, external: dict[str, NDArray[Any]]) -> bytes:
        """Return the graph in ONNX's format, without the content of ``external``."""
        from onnx import helper, numpy_helper

        constants = [
            _reference(name, array) if name in external else numpy_helper.from_array(array, name)
            for name, array in self._constants.items()
        ]
        declared = [
            [
                helper.make_tensor_value_info(
                    one.name, helper.np_dtype_to_tensor_dtype(np.dtype(one.dtype)), one.dims
                )
                for one in group
            ]
            for group in (self._inputs, self._outputs)
        ]
        graph = helper.make_graph(self._nodes, "graph", *declared, constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        return bytes(model.SerializeToString())

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}_{self._count}"


def _lent(array: NDArray[Any], number: int) -> Any:
    """Return ``array`` as a value of ONNX Runtime, valid until the next one with its shape and
    number."""
    import onnxruntime

    key = (number, *array.shape)
    if key in _scratch:
        _scratch[key].update_inplace(array)
    else:
        # A value does not copy its array, which has other users.
        _scratch[key] = onnxruntime.OrtValue.ortvalue_from_numpy(array.copy())
    return _scratch[key]


def _reference(name: str, array: NDArray[Any]) -> Any:
    """Return a constant whose content is passed to the session separately from the graph."""
    from onnx import TensorProto, helper

    tensor = TensorProto(
        name=name,
        data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
        dims=array.shape,
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in (("location", "memory"), ("offset", "0"), ("length", str(array.nbytes))):
        tensor.external_data.add(key=key, value=value)
    return tensor


@cache
def unusable() -> str:
    """Return the reason why ONNX Runtime cannot be used here; empty if it can.

    It must be installed, and a row of a product must have the same bits whatever rows are computed
    with it, which is true on all processors tested."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        return f"{error}: install the extra 'cpu'"
    random = np.random.default_rng(0)
    graph = Graph()
    out, width = _CHECKED_SHAPE
    weight = graph.constant(random.standard_normal((out, width), np.float32))
    graph.output(graph.node("Gemm", graph.input("x", "rows", width), weight, transB=1), "rows", out)
    x = random.standard_normal((max(_CHECKED_ROWS) + 1, width), np.float32)
    session = graph.session()
    (whole,) = session(x)
    for rows in _CHECKED_ROWS:
        if not np.array_equal(session(x[1 : rows + 1])[0], whole[1 : rows + 1]):
            return "on this processor, its results for a row depend on the other rows"
    return ""
