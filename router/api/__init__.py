"""What all generating endpoints share: body, operations, streaming, writers of answers."""
