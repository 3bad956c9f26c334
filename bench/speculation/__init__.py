"""Drafts: tokens a second with them, rules of other servers, the same text."""
