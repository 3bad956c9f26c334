"""The web application: middleware, connections, and endpoints that do not generate text."""
