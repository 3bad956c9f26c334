"""llama.cpp's `/infill`: the schemas, where its texts end, and its answers."""
