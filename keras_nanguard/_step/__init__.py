"""The transaction: one train step that commits whole or not at all, in each backend's own idiom."""
