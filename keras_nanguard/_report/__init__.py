"""How incidents are told: on the console and in files."""
