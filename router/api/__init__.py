"""The shared part of all generating endpoints: body, operations, streaming, writer interface."""
