"""The tables of docs/evidence.md agree with the campaigns, and name the measured commit."""

import pytest
from support.docs_tools import load

evidence_tables = load("evidence_tables")


@pytest.mark.parametrize("name", evidence_tables.SOURCES)
def test_a_table_agrees_with_its_campaign(name):
    assert evidence_tables.pages.read(evidence_tables.PAGE, name).strip() == evidence_tables.written(name)


@pytest.mark.parametrize("name", evidence_tables.SOURCES)
def test_a_table_names_the_commit_that_was_measured(name):
    """A figure without a commit cannot be repeated."""
    campaign, source, _ = evidence_tables.SOURCES[name]
    assert evidence_tables.pages.commit(evidence_tables.RESULTS / f"{campaign}.md", source)
