"""The decisions of a step: rows, chunks, prefixes, snapshots, pictures, drafts."""
