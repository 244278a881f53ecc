"""The page `/cache` in a browser: it shows the engine's state, on a desk and on a phone."""

import threading

import pytest

pytest.importorskip("fastapi", reason="the extra dsv4[serve] is not installed")

from tests.browser import open_browser, set_width
from tests.serve.server import DEADLINE, fake_server, wait_for

pytestmark = pytest.mark.browser
READ = """
const legend = (id) => Object.fromEntries([...document.querySelectorAll(`#${id}-legend li`)].map(
  (item) => [item.dataset.name, Number(item.dataset.value)]));
const figures = Object.fromEntries([...document.querySelectorAll("#figures div")].map(
  (box) => [box.dataset.name, box.querySelector("dd").textContent]));
const rows = [...document.querySelectorAll("#requests tr")].map(
  (row) => [...row.cells].map((cell) => cell.textContent));
return {
  figures, rows, blocks: legend("blocks"), memory: legend("memory"), hits: legend("hits"),
  title: document.getElementById("model").textContent,
  problem: document.getElementById("problem").textContent,
  points: document.getElementById("line").getAttribute("points"),
  isAsking: !document.getElementById("ask").hidden,
  isTooWide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
};
"""


@pytest.fixture(scope="module")
def driver():
    with open_browser() as browser:
        yield browser


def read_when(driver, condition, what):
    """Return what the page shows once that is so."""

    def look():
        shown = driver.execute_script(READ)
        return shown if condition(shown) else None

    return wait_for(look, what)


@pytest.mark.parametrize("width", [1200, 375])
def test_the_page_shows_the_engine(driver, width):
    with fake_server() as server:
        server.engine.script, server.engine.num_steps = ["a long answer"], 40
        server.engine.hold.set()
        ask = {"model": "tiny", "prompt": "hi"}
        request = threading.Thread(target=lambda: server.client.completions.create(**ask))
        request.start()
        wait_for(lambda: server.engine.open, "the request runs")
        (name,) = server.engine.open
        set_width(driver, width)
        driver.get(f"{server.url}/cache")
        shown = read_when(driver, lambda page: page["rows"], "the request is shown")
        assert shown["title"] == "tiny" and shown["problem"] == "" and not shown["isAsking"]
        assert shown["rows"] == [[f"{name[:8]} 0", "decode", "3", "4", "2"]]
        assert shown["figures"]["running"] == "1" and shown["figures"]["waiting"] == "0"
        assert shown["figures"]["generated tokens"] == "9"
        stats = {"requests": 2, "prefix cache": 0, "swapped requests": 1, "free": 5}
        assert shown["blocks"] == stats
        assert shown["memory"] == {"csa_kv": 1024, "swa": 2048}
        assert shown["hits"] == {"device": 10, "host": 30, "disk": 20, "computed": 70}
        assert not shown["isTooWide"]
        server.engine.num_steps += 1000
        rate = "steps a second"
        read_when(driver, lambda page: float(page["figures"][rate]) > 0, "steps are counted")
        server.engine.hold.clear()
        request.join(DEADLINE)
        read_when(driver, lambda page: not page["rows"], "the request has gone")
        server.engine.fatal_error = "<b>lost</b>"
        shown = read_when(driver, lambda page: page["problem"], "the page tells of the end")
        assert shown["problem"] == "The engine is dead: <b>lost</b>"
    read_when(driver, lambda page: "does not answer" in page["problem"], "the server has gone")
    assert not [line for line in driver.get_log("browser") if "net::ERR" not in line["message"]]


def test_the_page_asks_for_the_key(driver):
    with fake_server(api_key="secret") as server:
        driver.get(f"{server.url}/cache")
        read_when(driver, lambda page: page["isAsking"], "the page asks")
        driver.find_element("id", "key").send_keys("secret")
        driver.find_element("css selector", "#ask button").click()
        shown = read_when(driver, lambda page: page["title"] == "tiny", "the state is shown")
        assert not shown["isAsking"]
