"""The web application: middleware, connections, and the endpoints that generate no text."""
