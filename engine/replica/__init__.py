"""One replica put together: memory sizes, executor, scheduler, grammars."""
