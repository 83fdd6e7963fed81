"""Commands read files in the process of the tests."""

from support.reading import in_this_process, own_process  # noqa: F401
