"""Requirements of a release: the documents, one version, a changelog that begins with breaking changes."""

import shutil
from pathlib import Path

import pytest

from launching import load_program

ROOT = Path(__file__).resolve().parent.parent
check_release = load_program(ROOT / "tools" / "check_release.py")


def test_the_documents_of_this_version_are_complete():
    assert check_release.check_papers() is None


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("SECURITY.md", None, None, "SECURITY.md is missing"),
        ("CITATION.cff", "version: 0", "version: 9", "another version"),
        ("CHANGELOG.md", "### Changed: what breaks", "### Added: more\n\n### Changed: what breaks", "what breaks"),
        ("CHANGELOG.md", "\n## 0.", "\n## 9.", "does not begin with"),
        ("CONTRIBUTING.md", "## Deprecation", "## Ageing", "no deprecation policy"),
        ("pyproject.toml", '"SECURITY.md", ', "", "SECURITY.md is not in the sdist"),
    ],
)
def test_missing_documents_are_named(tmp_path, file, old, new, message):
    for name in (*check_release.PAPERS, "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    if old is None:
        (tmp_path / file).unlink()
    else:
        text = (tmp_path / file).read_text()
        assert old in text
        (tmp_path / file).write_text(text.replace(old, new, 1))
    with pytest.raises(SystemExit, match=message):
        check_release.check_papers(tmp_path)
