"""One request while it runs: its sequences and the text of its choices."""
