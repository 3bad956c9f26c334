"""Machine-dependent choices: BLAS, threads, memory allocation, array libraries."""

import os

# Otherwise ONNX Runtime (1.29 and later, on Linux) sends the names and hashes of models, with an
# identifier that it keeps in the user's cache, to Microsoft. It reads this when it is loaded, which
# is after any module of this package.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
