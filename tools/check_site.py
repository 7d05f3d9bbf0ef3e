"""Checks the built documentation: `check_site.py FOLDER`.

Every link, picture, script and style sheet that stays inside the site leads to a file, every #anchor to an element of that page, no element
has the id of another, and nothing but a link that a reader follows points out of the site, where it must be a well-formed address. Nothing
is fetched. Prints the counts and each problem; exits with 1 if there is one.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

_CSS_URL = re.compile(r"""(?:url\(\s*|@import\s+)["']?([^"')\s]+)""")
_ATTRIBUTES = {"href", "src", "data", "poster"}


class Page(HTMLParser):
    """The ids of a page, and what it refers to: (tag, address)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.targets: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (name == "name" and tag == "a"):
                self.ids.append(value)
            elif name in _ATTRIBUTES:
                self.targets.append((tag, value))
            elif name == "srcset":
                self.targets += [(tag, part.split()[0]) for part in value.split(",") if part.strip()]
            elif name == "style":
                self.targets += [("style", url) for url in _CSS_URL.findall(value)]


def check_external(tag: str, address: str, parts: SplitResult) -> str | None:
    """What is wrong with an address outside the site, if anything is."""
    if parts.scheme == "data":
        return None
    if tag != "a":
        return f"<{tag}> loads {address} from outside the site"
    if parts.scheme == "mailto":
        return None if "@" in parts.path else f"{address}: expected a mail address"
    if parts.scheme not in ("http", "https") or not re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?", parts.netloc) or " " in address:
        return f"{address}: expected an address of the form https://host/path"
    return None


def check_site(site: Path) -> tuple[list[str], int, int]:
    """Problems, the number of pages, and the number of addresses in them."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    problems: list[str] = []
    count = 0
    targets = {path: page.targets for path, page in pages.items()}
    for path in sorted(site.rglob("*.css")):
        targets[path.resolve()] = [("style", url) for url in _CSS_URL.findall(path.read_text(encoding="utf-8"))]
    root = site.resolve()
    for path, addresses in targets.items():
        where = path.relative_to(root)
        for tag, address in addresses:
            count += 1
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if problem := check_external(tag, address, parts):
                    problems.append(f"{where}: {problem}")
                continue
            target = path
            if parts.path:
                name = unquote(parts.path)
                target = (root / name.lstrip("/") if name.startswith("/") else path.parent / name).resolve()
                target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or not target.is_relative_to(root):
                problems.append(f"{where}: {address} leads to no file of the site")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                problems.append(f"{where}: {address}: {target.relative_to(root)} has no element with that id")
    for path, page in pages.items():
        problems += [
            f"{path.relative_to(root)}: the id {name} stands twice" for name in sorted({i for i in page.ids if page.ids.count(i) > 1})
        ]
    return problems, len(pages), count


def main() -> int:
    site = Path(sys.argv[1])
    problems, pages, count = check_site(site)
    print(f"{pages} pages, {count} addresses, {len(problems)} problems")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
