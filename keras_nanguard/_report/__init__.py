"""Reports of incidents: on the console and in files."""
