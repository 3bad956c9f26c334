"""Large libraries imported in part, so that processes start faster."""
