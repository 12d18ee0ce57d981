"""Staff at the admin: what they may do, and what their browser would send of a page."""

from html.parser import HTMLParser
from typing import Any

from django.contrib.auth.models import Permission, User
from django.test import Client


def logged_in(*permissions: str, **options: Any) -> Client:
    """Return a client of a staff member with these permissions, such as "shop.view_job"."""
    user = User.objects.create(username=f"staff-{User.objects.count()}", is_staff=True)
    for permission in permissions:
        label, _, codename = permission.partition(".")
        user.user_permissions.add(
            Permission.objects.get(content_type__app_label=label, codename=codename)
        )
    return _client_of(user, options)


def superuser(**options: Any) -> Client:
    """Return a client of a staff member who may do everything."""
    name = f"staff-{User.objects.count()}"
    user = User.objects.create(username=name, is_staff=True, is_superuser=True)
    return _client_of(user, options)


def _client_of(user: User, options: dict[str, Any]) -> Client:
    client = Client(**options)
    client.force_login(user)
    return client


class _Form(HTMLParser):
    """The fields of a page, as they stand on it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fields: dict[str, str] = {}
        self._area = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        name = values.get("name", "")
        unsent = values.get("type") in ("submit", "button", "search")
        unchecked = values.get("type") == "checkbox" and "checked" not in values
        if tag == "input" and name and not unsent and not unchecked:
            self.fields[name] = values.get("value", "on" if "checked" in values else "")
        elif tag == "textarea":
            self._area = name
            self.fields[name] = ""

    def handle_data(self, data: str) -> None:
        if self._area:
            self.fields[self._area] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "textarea":
            # The first line break after the tag is none of the text.
            self.fields[self._area] = self.fields[self._area].lstrip("\r\n")
            self._area = ""


def fields_of(response: Any) -> dict[str, str]:
    """Return what a browser would send of this page if nobody changed it."""
    return _Form(response.content.decode()).fields


class Tables(HTMLParser):
    """The rows of a page's tables by the id of their section, and the links in them."""

    def __init__(self, response: Any) -> None:
        super().__init__()
        self.rows: dict[str, list[list[str]]] = {}
        self.links: dict[str, str] = {}
        self._section = self._link = ""
        self._cell = False
        self.feed(response.content.decode())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "section":
            self._section = values.get("id") or ""
            self.rows[self._section] = []
        elif self._section and tag == "tr":
            self.rows[self._section].append([])
        elif self._section and tag in ("td", "th"):
            self.rows[self._section][-1].append("")
            self._cell = True
        elif tag == "a":
            self._link = values.get("href") or ""

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.rows[self._section][-1][-1] += data
        if self._link:
            self.links[data.strip()] = self._link

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._cell:
            self._cell = False
            row = self.rows[self._section][-1]
            row[-1] = row[-1].strip("\n")
        elif tag == "a":
            self._link = ""

    def row_of(self, section: str, resource: str) -> list[str]:
        """Return the cells of the one row of `resource`, without the link that ends a lease."""
        (row,) = [row for row in self.rows[section] if row[0] == resource]
        return [cell.removesuffix("End…").removesuffix("· ").strip() for cell in row]

    def names(self, section: str) -> list[str]:
        """Return the first cells, without that of the heading."""
        return [row[0] for row in self.rows[section][1:]]
