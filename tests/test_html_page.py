"""The page of `ta.plot.html` in a browser: what a reader does, and what is then shown."""

import base64
import json
import re
import sys

import numpy as np
import pytest
import torch

import tiled_attention as ta
from browser import chromium, emulate

HOSTILE = ["</script><b id=evil>", "<img src=x onerror=alert(1)>", "a\u2028b", "\u202eright", "&amp;", "${1}", " ", "\n"]
TOKENS = ["[CLS]", "the", "un", "##believ", "##able", "cat", "sat", "on", "the", "mat", *HOSTILE]


@pytest.fixture(scope="module")
def session():
    pytest.importorskip("selenium", reason="selenium is not installed; it is in the extra 'test'")
    with chromium() as session:
        yield session


class Reader:
    """A page that is open, with the weights that it shows."""

    def __init__(self, session, path):
        self.session = session
        session.get_log("performance")
        session.get_log("browser")
        session.get(path.as_uri())
        self.wait("return document.documentElement.dataset.drawn !== undefined || !document.getElementById('failure').hidden")
        assert self.js("return document.getElementById('failure').hidden"), self.text("failure")

    def js(self, script, *arguments):
        return self.session.execute_script(script, *arguments)

    def wait(self, script):
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.session, 20, poll_frequency=0.02).until(lambda session: session.execute_script(script))

    def find(self, css):
        return self.session.find_element("css selector", css)

    def text(self, name):
        return self.js("return document.getElementById(arguments[0]).textContent", name)

    def hover(self, element, x=0, y=0):
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.session, duration=0).move_to_element_with_offset(element, x, y).perform()

    def press(self, *keys, shift=False):
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        actions = ActionChains(self.session, duration=0)
        for key in keys:
            key = getattr(Keys, key) if len(key) > 1 else key
            actions = actions.key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT) if shift else actions.send_keys(key)
        actions.perform()

    def chosen(self):
        """(query, pinned, layer, head)"""
        query = self.js("const q = document.querySelector('.query'); return [Number(q.dataset.index), q.classList.contains('pinned')]")
        return (*query, int(self.js("return layer.value")), int(self.js("return head.value")))

    def best(self):
        """[(weight, key)] of the list of the largest weights."""
        rows = self.js("return [...document.querySelectorAll('#top li')].map((row) => [...row.children].map((part) => part.textContent))")
        return [(float(row[0]), int(row[2])) for row in rows]

    def table(self):
        """The third column of the table."""
        return self.js("return [...document.querySelectorAll('#table tbody tr')].map((row) => row.lastChild.textContent)")

    def failures(self):
        return [entry for entry in self.session.get_log("browser") if entry["level"] == "SEVERE"]

    def requests(self):
        """Addresses that the browser asked for."""
        messages = [json.loads(entry["message"])["message"] for entry in self.session.get_log("performance")]
        return [message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"]


def softmax(*shape, mask=None):
    lead, seqlen_q, seqlen_kv = shape[:-2], *shape[-2:]
    torch.manual_seed(3)
    return ta.attention_weights(2 * torch.randn(*lead, seqlen_q, 8), torch.randn(*lead, seqlen_kv, 8), mask=mask)


WEIGHTS = softmax(3, 4, len(TOKENS), len(TOKENS))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return ta.plot.html(WEIGHTS, TOKENS, title="<b>title</b>").save(tmp_path_factory.mktemp("pages") / "plain.html")


@pytest.fixture
def reader(session, plain):
    emulate(session)
    reader = Reader(session, plain)
    yield reader
    assert reader.failures() == []


def check_row(reader, query, layer=0, head=0, weights=WEIGHTS):
    """The list shows the largest weights of the row, within the error of the page and the digits shown."""
    exact = weights[layer, head, query].numpy()
    best = reader.best()
    assert len(best) == 8
    for weight, key in best:
        assert weight == pytest.approx(exact[key], abs=5e-3)
    assert best[0][1] == exact.argmax() and best[0][0] == pytest.approx(exact.max(), abs=6e-4)


def test_pointing_at_a_token_shows_its_row(reader):
    reader.hover(reader.find("#q5"))
    assert reader.chosen() == (5, False, 0, 0)
    check_row(reader, 5)
    reader.hover(reader.find("#q1"))
    check_row(reader, 1)
    shades = reader.js("return [...document.querySelectorAll('#queries span')].map((chip) => chip.style.backgroundColor)")
    darkest = min(range(len(shades)), key=lambda j: sum(map(int, re.findall(r"\d+", shades[j]))))
    assert darkest == int(WEIGHTS[0, 0, 1].argmax())


def test_click_pins_and_releases(reader):
    reader.find("#q5").click()
    reader.hover(reader.find("#q2"))
    assert reader.chosen() == (5, True, 0, 0)
    check_row(reader, 5)
    assert reader.js("return document.querySelector('#queries [aria-selected=true]').id") == "q5"
    assert "pinned" in reader.text("live")
    reader.find("#q5").click()
    reader.hover(reader.find("#q2"))
    assert reader.chosen() == (2, False, 0, 0)
    reader.find("#q2").click()
    reader.press("ESCAPE")
    assert reader.chosen() == (2, False, 0, 0)


def test_map_answers_the_pointer(reader):
    left, top, width, height = reader.js("return [layout.left, layout.top, layout.width, layout.height]")
    canvas, count = reader.find("#map"), len(TOKENS)
    size = canvas.size
    x = left + (7.5 / count) * width - size["width"] / 2
    y = top + (3.5 / count) * height - size["height"] / 2
    reader.hover(canvas, round(x), round(y))
    assert reader.chosen()[0] == 3
    check_row(reader, 3)
    assert reader.js("return document.getElementById('tip').hidden") is False
    assert float(reader.text("tip").split()[-1]) == pytest.approx(WEIGHTS[0, 0, 3, 7].item(), abs=5e-3)
    canvas_pixel = "const [x, y] = arguments; return [...document.getElementById('map').getContext('2d').getImageData(x, y, 1, 1).data]"
    ratio = reader.js("return window.devicePixelRatio")
    place = lambda start, size, index: round(ratio * (start + (index + 0.5) / count * size))
    cell = lambda i, j: reader.js(canvas_pixel, place(left, width, j), place(top, height, i))
    largest = int(WEIGHTS[0, 0, 3].argmax())
    assert sum(cell(3, largest)[:3]) < min(sum(cell(3, j)[:3]) for j in range(count) if j != largest)


def test_keyboard_reaches_everything(reader):
    reader.js("document.getElementById('queries').focus()")
    reader.press("ARROW_RIGHT", "ARROW_DOWN", "ARROW_RIGHT", "ARROW_LEFT")
    assert reader.chosen() == (2, False, 0, 0)
    assert reader.js("return document.getElementById('queries').getAttribute('aria-activedescendant')") == "q2"
    reader.press("ENTER")
    assert reader.chosen() == (2, True, 0, 0)
    reader.press("END")
    assert reader.chosen() == (len(TOKENS) - 1, True, 0, 0)
    reader.press("HOME", "ESCAPE")
    assert reader.chosen() == (0, False, 0, 0)
    reader.press("h", "l", "l")
    reader.wait("return state.map && layer.value === '2'")
    assert reader.chosen() == (0, False, 2, 1)
    reader.press("H", "H", "L", shift=True)
    reader.wait("return layer.value === '1'")
    assert reader.chosen() == (0, False, 1, 3)
    reader.press("+", "+")
    assert reader.js("return [state.zoom, layout.rows]")[0] == 2  # 18 tokens: at least 8 in sight
    reader.press("0")
    assert reader.js("return layout.rows") == len(TOKENS)
    reader.press("?")
    assert reader.find("#keys-help").is_displayed()
    reader.find("#letters").click()
    reader.js("document.getElementById('queries').focus()")
    reader.press("h")
    assert reader.chosen() == (0, False, 1, 3)


def test_focus_is_visible_and_in_reading_order(reader):
    reader.js("document.body.focus()")
    order = []
    for _ in range(12):
        reader.press("TAB")
        order.append(reader.js("return document.activeElement.id || document.activeElement.parentElement.id"))
        outline = "const style = getComputedStyle(document.activeElement); return [style.outlineStyle, parseFloat(style.outlineWidth)]"
        style, width = reader.js(outline)
        assert style != "none" and width >= 2, order[-1]
    wanted = ["table-switch", "keys-switch", "theme", "layer", "head", "search", "scale", "faint", "queries", "larger", "map", "heads"]
    assert [name for name in order if name in wanted] == wanted


def test_search(reader):
    reader.press("/")
    reader.find("#search").send_keys("UNBELIEVABLE")
    assert reader.text("found") == "1 found"
    assert reader.js("return [...document.querySelectorAll('.match')].map((chip) => chip.id)") == ["q2", "q3", "q4"]
    reader.find("#search").clear()
    reader.find("#search").send_keys("the")
    reader.press("ENTER")
    assert reader.text("found") == "1 of 2" and reader.chosen()[:2] == (1, True)
    reader.press("ENTER")
    assert reader.text("found") == "2 of 2" and reader.chosen()[:2] == (8, True)
    reader.press("ENTER", shift=True)
    assert reader.chosen()[:2] == (1, True)
    reader.find("#search").clear()
    reader.find("#search").send_keys("no such token")
    assert reader.text("found") == "0 found"


def test_layer_and_head_are_chosen_by_list_and_by_picture(reader):
    from selenium.webdriver.support.ui import Select

    Select(reader.find("#layer")).select_by_index(2)
    reader.wait("return document.getElementById('picture-title').textContent.includes('layer 2, head 0')")
    Select(reader.find("#head")).select_by_index(3)
    reader.wait("return document.querySelector('#heads [aria-pressed=true]').dataset.head === '3'")
    reader.hover(reader.find("#q4"))
    check_row(reader, 4, 2, 3)
    thumb = reader.find("[aria-label='layer 1, head 2']")
    thumb.click()
    reader.wait("return layer.value === '1' && head.value === '2'")
    reader.hover(reader.find("#q7"))
    check_row(reader, 7, 1, 2)
    reader.js("arguments[0].focus()", thumb)
    reader.press("ARROW_RIGHT", "ARROW_UP", "ENTER")
    reader.wait("return layer.value === '0' && head.value === '3'")
    assert reader.js("return document.querySelectorAll('#heads button').length") == 12


def test_table_is_the_row_in_words(reader):
    reader.find("#q6").click()
    reader.find("#table-switch").click()
    assert reader.find("#table-switch").get_attribute("aria-expanded") == "true"
    found = np.array([float(text.removeprefix("< ")) for text in reader.table()])
    assert np.abs(found - WEIGHTS[0, 0, 6].numpy()).max() < 5e-3
    assert reader.find("#table caption").text == "layer 0, head 0: weights of query 6, sat"
    assert [cell.text for cell in reader.session.find_elements("css selector", "#table thead th")] == ["Key", "Token", "Weight"]
    reader.press("ARROW_RIGHT")  # the focus is on the button: nothing moves
    assert reader.chosen()[0] == 6
    reader.js("document.getElementById('queries').focus()")
    reader.press("ARROW_RIGHT")
    assert np.abs(np.array([float(text.removeprefix("< ")) for text in reader.table()]) - WEIGHTS[0, 0, 7].numpy()).max() < 5e-3


def test_names_and_roles_for_screen_readers(reader):
    tree = reader.session.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    named = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]}
    assert {("listbox", "Queries"), ("combobox", "Layer"), ("combobox", "Head"), ("searchbox", "Search")} <= named
    assert {("button", "Table"), ("button", "layer 2, head 3"), ("option", "cat")} <= named
    assert any(role in ("img", "image") and name.startswith("Map of layer 0, head 0") for role, name in named)
    assert not [role for role, name in named if role in ("button", "combobox", "checkbox", "searchbox") and not name]


def test_hostile_tokens_are_text(reader):
    assert reader.session.title == "<b>title</b>"
    assert reader.js("return document.getElementById('evil')") is None
    assert reader.js("return document.querySelectorAll('img, main b:not(.token), iframe').length") == 0
    chips = reader.js("return [...document.querySelectorAll('#queries span')].map((chip) => chip.textContent)")
    assert chips == [*TOKENS[:-1], "⏎"]
    reader.find("#table-switch").click()
    for query in range(10, len(TOKENS)):
        reader.js("look(arguments[0])", query)
    assert reader.js("return document.getElementById('evil')") is None


def test_no_request_is_made(reader):
    reader.press("h", "l", "t", "d")
    reader.wait("return layer.value === '1'")
    assert [url.split(":")[0] for url in reader.requests()] == ["file"]
    reader.js("const f = document.createElement('img'); f.src = 'https://example.invalid/a.png'; document.body.append(f)")
    reader.wait("return !document.querySelector('img').complete || document.querySelector('img').naturalWidth === 0")
    assert "Content Security Policy" in str(reader.failures())


def contrast(first, second):
    """WCAG 2.2 of two CSS colours rgb(...)."""
    levels = []
    for colour in (first, second):
        parts = np.array([float(part) for part in re.findall(r"[\d.]+", colour)[:3]]) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        levels.append(linear @ [0.2126, 0.7152, 0.0722])
    return (max(levels) + 0.05) / (min(levels) + 0.05)


def test_dark_and_light(session, plain):
    for dark in (False, True):
        emulate(session, dark=dark)
        reader = Reader(session, plain)
        theme = lambda reader=reader: reader.js("return document.documentElement.dataset.theme")
        ground = lambda reader=reader: reader.js("return getComputedStyle(document.body).backgroundColor")
        assert theme() == ("dark" if dark else "light")
        before = ground()
        pairs = reader.js(
            "return [false, true].flatMap((dark) => { const c = coloursOf(dark); return c.css.map((g, i) => [g, c.ink[i]]); })"
        )
        rgb = {"#0b0d10": "rgb(11 13 16)", "#ffffff": "rgb(255 255 255)"}
        pairs = [[shade, rgb[ink]] for shade, ink in pairs]
        assert min(contrast(*pair) for pair in pairs) >= 4.2
        for css in ("#hint", ".layer-name", "h1", "#theme"):
            colour = reader.js("return getComputedStyle(document.querySelector(arguments[0])).color", css)
            assert contrast(colour, before) >= 4.5, css
        reader.find("#theme").click()
        assert theme() == ("light" if dark else "dark") and ground() != before
        assert reader.find("#theme").get_attribute("aria-pressed") == str(not dark).lower()
        reader.hover(reader.find("#q3"))
        check_row(reader, 3)
        assert reader.failures() == []


def test_scales_of_colour(reader):
    from selenium.webdriver.support.ui import Select

    reader.hover(reader.find("#q3"))
    key = int(WEIGHTS[0, 0, 3].argsort()[-2])
    colour = "return document.getElementById('q' + arguments[0]).style.backgroundColor"
    shade = lambda: sum(map(int, re.findall(r"\d+", reader.js(colour, key))))
    shades = []
    for value in ("row", "head", "one"):
        Select(reader.find("#scale")).select_by_value(value)
        shades.append(shade())
    assert shades[0] <= shades[1] <= shades[2] and shades[0] < shades[2]
    reader.find("#faint").click()
    assert shade() < shades[2]


def test_phone(session, plain):
    emulate(session, phone=True)
    try:
        reader = Reader(session, plain)
        assert reader.js("return document.documentElement.scrollWidth") <= 390
        assert "Tap" in reader.text("hint")
        assert reader.js("return document.getElementById('map').getBoundingClientRect().right") <= 390
        sides = reader.js("return [...document.querySelectorAll('#heads button')].map((b) => Math.min(b.offsetWidth, b.offsetHeight))")
        assert min(sides) >= 44
        reader.find("#q5").click()
        assert reader.chosen()[:2] == (5, True)
        check_row(reader, 5)
        assert reader.failures() == []
    finally:
        emulate(session)


def test_cross_attention_has_queries_and_keys(session, tmp_path):
    weights = softmax(1, 2, 4, 7, mask=ta.Causal())[0]
    keys = [f"key{j}" for j in range(7)]
    reader = Reader(session, ta.plot.html(weights, list("abcd"), key_tokens=keys).save(tmp_path / "cross.html"))
    reader.hover(reader.find("#q1"))
    assert reader.chosen()[0] == 1
    chips = reader.js("return [...document.querySelectorAll('#keys span')].map((chip) => [chip.textContent, chip.className])")
    assert chips == [[key, "unseen" if j > 4 else ""] for j, key in enumerate(keys)]
    assert [key for _, key in reader.best()] == weights[0, 1, :5].argsort(descending=True).tolist()
    reader.find("#table-switch").click()
    assert reader.table()[5:] == ["hidden", "hidden"]
    assert reader.find("#hidden-key").is_displayed()


def test_long_texts_show_means_and_the_largest_weights(session, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["tiled_attention.plot.html"], "_BUDGET", 110_000)
    length = 600
    weights = softmax(1, 2, length, length, mask=ta.Causal())
    page = ta.plot.html(weights, [f"t{i}" for i in range(length)])
    assert page.kept == "largest"
    reader = Reader(session, page.save(tmp_path / "long.html"))
    reader.find("#q50").click()
    exact = weights[0, 0, 50].numpy()
    best = reader.best()
    assert best[0][1] == exact.argmax()
    assert all(weight == pytest.approx(exact[key], abs=2e-3) for weight, key in best)
    reader.find("#table-switch").click()
    table = reader.table()
    assert table[51:] == ["hidden"] * (length - 51) and "small" in table[:51]
    assert "largest weights of each row" in reader.text("accuracy")
    reader.js("pin(550)")
    low, high = reader.js("const box = queries.getBoundingClientRect(); return [box.top, box.bottom]")
    assert low <= reader.js("return document.getElementById('q550').getBoundingClientRect().top") <= high
    reader.js("pin(50)")
    reader.press("+", "+", "+")
    assert reader.js("return [layout.rows, layout.row]") == [75, 13]
    pixel = "const [x, y] = arguments; return [...document.getElementById('map').getContext('2d').getImageData(x, y, 1, 1).data]"
    left, top, width, height, column, ratio = reader.js(
        "return [layout.left, layout.top, layout.width, layout.height, layout.column, window.devicePixelRatio]"
    )
    place = lambda start, size, index: round(ratio * (start + (index + 0.5) / 75 * size))
    shade = lambda i, j: reader.js(pixel, place(left, width, j - column), place(top, height, i - 13))
    row = weights[0, 0, 60]
    near = range(column, 61)
    darkest = min(near, key=lambda j: sum(shade(60, j)[:3]))
    assert darkest == max(near, key=lambda j: row[j])
    red, green, blue = shade(20, 70)[:3]
    assert max(red, green, blue) - min(red, green, blue) < 16  # hidden: grey
    assert reader.failures() == []


def test_512_tokens_12_layers_12_heads_fit_and_draw(session, tmp_path):
    weights = softmax(12, 12, 512, 512)
    page = ta.plot.html(weights, [f"t{i}" for i in range(512)])
    path = page.save(tmp_path / "large.html")
    assert path.stat().st_size < 15_000_000 and page.kept == "all" and page.error["largest_of_row"] < 0.05
    reader = Reader(session, path)
    reader.find("[aria-label='layer 11, head 7']").click()
    reader.wait("return layer.value === '11' && head.value === '7'")
    reader.js("document.getElementById('queries').scrollIntoView()")
    reader.hover(reader.find("#q3"))
    row = np.array(reader.js("return [...weights]"))
    assert np.abs(row - weights[11, 7, 3].numpy()).max() <= page.error["largest"] * 1.001
    assert reader.failures() == []


def test_notebook_frame_runs(session, tmp_path):
    page = ta.plot.html(WEIGHTS, TOKENS)
    path = tmp_path / "notebook.html"
    path.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{page._repr_html_()}", encoding="utf-8")
    session.get(path.as_uri())
    session.switch_to.frame(0)
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(session, 20).until(lambda s: s.execute_script("return document.documentElement.dataset.drawn"))
    session.find_element("css selector", "#q5").click()
    assert session.execute_script("return document.querySelector('.pinned').id") == "q5"
    session.switch_to.default_content()


def test_a_screenshot_has_the_map(reader):
    picture = base64.b64decode(reader.find("#map").screenshot_as_base64)
    assert picture.startswith(b"\x89PNG") and len(picture) > 5_000
