"""The processes of the server, the supervisor that runs them, and the command line."""
