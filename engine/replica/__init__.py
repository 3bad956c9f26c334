"""Builds one replica from its parts: memory sizes, executor, scheduler, grammars."""
