"""Between text and tokens: templates, tokenization, detokenization, parsing of answers."""
