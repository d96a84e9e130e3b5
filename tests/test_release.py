"""What a release needs beside the code: papers, one version, a changelog that begins with what breaks."""

import importlib.util
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("check_release", ROOT / "tools" / "check_release.py")
check_release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_release)


def test_the_papers_of_this_version_are_complete():
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
def test_what_is_missing_is_said(tmp_path, file, old, new, message):
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
