"""Code common to all backends. It selects by backend only through `_backends.current`."""
