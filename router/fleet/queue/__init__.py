"""The queue: admission, the order between tenants, and the placement on engines."""
