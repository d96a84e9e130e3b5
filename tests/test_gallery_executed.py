"""Every notebook of the gallery runs and prints what its page says; it takes minutes, so with `--all` only."""

import pytest

from test_gallery import HERE, build

pytest.importorskip("nbclient")


@pytest.mark.parametrize("name", build.NAMES)
def test_notebooks_print_what_their_pages_say(name):
    executed, seconds = build.execute(name)
    assert seconds <= build.SECONDS
    page = (HERE / f"{name}.md").read_text(encoding="utf-8")
    said, printed = build.printed_in(page), build.printed_in(build.render(name, executed)[0])
    assert len(said) == len(printed)
    for before, now in zip(said, printed, strict=True):
        assert build.agree(before, now), f"the page says\n\n{before}\n\nand the notebook prints\n\n{now}"
