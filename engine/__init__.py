"""One replica of a model: schedule, run, sample, cache."""
