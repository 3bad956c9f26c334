"""What processes that handle untrusted input share with those that start them."""
