"""The one place where versions stand. No imports: the command line answers `--version` from here at once."""

VERSION = "0.1.0"
"""The package's version; `pyproject.toml` reads it from here."""

PROTOCOL = 1
"""The wire's version. Raised when old nodes could misread what new ones send; proto/README.md has the rule."""
