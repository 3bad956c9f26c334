"""ONNX Runtime: graphs built in memory, and the weights in them."""
