"""The engine without HTTP: steps, chunks, kernels, grammars, vectors."""
