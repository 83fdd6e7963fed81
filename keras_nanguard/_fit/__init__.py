"""A guarded run on the host's side: what happens between two steps."""
