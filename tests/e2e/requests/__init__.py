"""What clients of each API send and get."""
