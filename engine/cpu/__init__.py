"""Everything that is computed on a CPU outside MLX: by NumPy, ONNX Runtime and a fast BLAS.

    layers.py    layers of mlx-lm's modules, one by one     gates.py   the gates of their MLPs
    decoder/     models like Llama as a whole               texts.py   embedding models
    attention/   batches and their attention                pages/     keys and values in memory
    towers.py    layers of vision encoders                  onnx/      graphs and their weights

The rest of the engine imports none of it, but `engine.device`. What is called from outside are
implementations of its interfaces: `HostBatch` of `engine.batch.ragged.RaggedBatch`, `HostPages` of
`engine.cache.pages.Pages`.
"""

import os

# Otherwise ONNX Runtime (1.29 and later, on Linux) sends the names and hashes of models, with an
# identifier that it keeps in the user's cache, to Microsoft. It reads this when it is loaded, which
# is after any module of this package.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
