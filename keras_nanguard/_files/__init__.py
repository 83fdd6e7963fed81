"""Model files and live models: `scan`, `repair`, `recalibrate`; and bundles."""
