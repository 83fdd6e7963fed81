"""Model files and live models: reading, scanning, repairing and recalibrating them."""
