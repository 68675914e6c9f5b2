"""`python -m tests.api_reference`: write docs/api.md."""

from tests.api_reference.page import PATH, page

PATH.parent.mkdir(exist_ok=True)
PATH.write_text(page(), encoding="utf-8")
