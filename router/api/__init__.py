"""What all generating endpoints share: body, operations, streaming, the interface of writers."""
