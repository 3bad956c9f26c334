"""The router: HTTP in front, engines behind; everything between a request and its answer."""
