"""Between text and tokens: templates, tokenizing, detokenizing, parsing of replies."""
