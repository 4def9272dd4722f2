"""Looks at every page of the built site in Chromium: `python tests/docs/browser.py site pictures ['how-to*-phone-*']`.

Needs the package playwright and a Chromium (`CHROMIUM=/usr/bin/chromium`). Takes a picture of each page at
two widths in light and dark, for a person to look at, and complains about what a program can see: a page that is wider
than its window, errors of scripts, pictures that do not load, and anything that is asked of another server. A pattern
chooses pictures by name (page-window-scheme).
"""

import fnmatch
import functools
import http.server
import os
import sys
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright

WINDOWS = {"desktop": (1280, 900), "phone": (390, 844)}
BROKEN_PICTURES = "[...document.images].filter(image => !image.complete || !image.naturalWidth).length"
# What sticks out to the right and cannot be scrolled to.
CUT = """[...document.querySelectorAll(".md-content :is(img, svg, table, pre)")].filter(thing => {
    if (thing.getBoundingClientRect().right <= window.innerWidth) return false;
    const scrolls = frame =>
        /auto|scroll/.test(getComputedStyle(frame).overflowX) && frame.scrollWidth > frame.clientWidth;
    for (let frame = thing; frame; frame = frame.parentElement) if (scrolls(frame)) return false;
    return true;
}).length"""
TOO_WIDE = "document.documentElement.scrollWidth - window.innerWidth"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_args):
        """Say nothing."""


def complaints_of(page, address, picture):
    """Open a page, take its picture, and return what is wrong with it."""
    found = []
    page.on("pageerror", lambda error: found.append(f"script: {error}"))
    page.on("requestfailed", lambda request: found.append(f"failed: {request.url}"))
    page.goto(address, wait_until="load")
    if (pixels := page.evaluate(TOO_WIDE)) > 0:
        found.append(f"{pixels} pixels too wide")
    if number := page.evaluate(BROKEN_PICTURES):
        found.append(f"{number} broken pictures")
    if number := page.evaluate(CUT):
        found.append(f"{number} things are cut off")
    page.screenshot(path=picture, full_page=True)
    return found


def main(site, pictures, pattern="*"):
    pictures.mkdir(parents=True, exist_ok=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}/"
    pages = sorted(path.parent.relative_to(site).as_posix() for path in site.rglob("index.html"))
    bad = 0
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"]
        )
        for window, (width, height) in WINDOWS.items():
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
                context.route(
                    lambda url: not url.startswith(home), lambda route: route.abort()
                )  # shows up as a failed request
                for name in pages:
                    picture = pictures / f"{name.strip('.').replace('/', '_') or 'home'}-{window}-{scheme}.png"
                    if not fnmatch.fnmatch(picture.stem, pattern):
                        continue
                    page = context.new_page()
                    for complaint in complaints_of(page, home if name == "." else f"{home}{name}/", picture):
                        bad += 1
                        print(f"{name} ({window}, {scheme}): {complaint}")
                    page.close()
                context.close()
        browser.close()
    server.shutdown()
    print(f"{len(pages)} pages, {bad} complaints; pictures are in {pictures}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
