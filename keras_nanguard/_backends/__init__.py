"""The transaction in each backend's own idiom: one package per backend, all behind the interface in `interface.py`."""
