"""The IO thread: messages to and from the router and the kvstore."""
