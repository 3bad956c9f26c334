"""The directory of ``--batch-dir``: database, files, and the thread that writes."""
