"""The command `keras-nanguard`: the function that the installed script calls."""

from importlib.metadata import entry_points

main = entry_points(group="console_scripts")["keras-nanguard"].load()
