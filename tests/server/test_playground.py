"""The page at `/` in a real browser, against a real server."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import ENTER, ESCAPE, LEFT, UP, Browser, browsing, missing
from byte_tokenizer import EOS, VOCAB_SIZE
from scripted import MAX_MODEL_LEN, NAN, TOKENIZER, ScriptedEngine, Server, says, serving

from jaxinfer.server.context import ServedModel
from jaxinfer.text.chat import ChatTemplate

without_browser = missing()
needs_browser = pytest.mark.skipif(without_browser is not None, reason=f"{without_browser} is not installed")

HOSTILE = (
    "<img src=x onerror='window.pwned=1'><script>window.pwned=2</script>\n"
    '```html\n<svg onload="window.pwned=3"></svg>\n```\n'
    "[a](javascript:window.pwned=4) <a href='javascript:window.pwned=5'>b</a> &lt;b&gt; \u202e <style>*{display:none}</style>"
)
LAST = ".message.assistant:last-of-type"


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(shared_browser: Browser) -> Iterator[Browser]:
    """At desktop size. Nothing that a test does may make the console complain, but for what it takes off it itself."""
    shared_browser.resize(1440, 900)
    yield shared_browser
    # A page that outlives its server for a moment finds nobody: that is the test's doing, not the page's.
    assert [line for line in shared_browser.console() if "ERR_CONNECTION_REFUSED" not in line] == []
    shared_browser.open("about:blank")


def show(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/")
    browser.wait_text("#state", "ready")


def ask(browser: Browser, text: str) -> None:
    browser.type("#input", text + ENTER)


def answered(browser: Browser) -> str:
    """The text of the last answer, once it is whole."""
    browser.wait(lambda: browser.run(f"return document.querySelector('{LAST}')?.ariaBusy === 'false'"))
    return browser.text(f"{LAST} .text")


def fetch(server: Server, **headers: str) -> tuple[int, str, Any]:
    try:
        request = urllib.request.Request(f"{server.url}/", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", error.headers


# The file and its headers


class Elements(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_needs_nothing_from_elsewhere_and_allows_nothing_else(serve):
    status, text, headers = fetch(serve())
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = dict(item.split(" ", 1) for item in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy["style-src"])
    assert headers["X-Content-Type-Options"] == "nosniff"
    for tag, attributes in Elements(text).found:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "src")], tag
        assert not re.match(r"(https?:)?//", attributes.get("href") or ""), attributes
    script = text.partition("<script>")[2]
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert sink not in script


def test_the_page_is_kept_by_browsers_until_it_changes(serve):
    server = serve()
    tag = fetch(server)[2]["ETag"]
    status, text, headers = fetch(server, **{"If-None-Match": tag})
    assert (status, text, headers["ETag"]) == (304, "", tag)
    assert fetch(server, **{"If-None-Match": '"other"'})[0] == 200


def test_the_page_itself_needs_no_key(serve, tmp_path: Path):
    (tmp_path / "keys").write_text("sk-secret\n")
    status, text, _ = fetch(serve(api_keys_file=tmp_path / "keys"))
    assert status == 200
    assert "sk-secret" not in text


# Chat


@needs_browser
def test_a_chat_is_streamed_with_the_settings_given(browser: Browser):
    engine = ScriptedEngine(says("Hello there, this is the answer."), step_seconds=0.01)
    with serving(engine) as server:
        show(browser, server)
        browser.type("[name=temperature]", "0.5")
        browser.type("[name=seed]", "7")
        browser.type("[name=stop]", "ZZ\nYY")
        browser.type("[name=system]", "Be brief")
        browser.type("[name=extra]", '{"min_tokens": 2}')
        ask(browser, "first question")
        browser.wait(lambda: browser.text(f"{LAST} .text") not in ("", "Hello there, this is the answer."))
        assert answered(browser) == "Hello there, this is the answer."
        prompt, params, _ = engine.seen[-1]
        text = bytes(t for t in prompt if t < 256).decode()
        assert "Be brief" in text
        assert "first question" in text
        assert (params.temperature, params.seed, params.stop, params.min_tokens) == (0.5, 7, ("ZZ", "YY"), 2)
        assert params.max_tokens == 1024
        footer = browser.text(f"{LAST} footer")
        assert re.search(r"33 tokens · \d+ tokens/s · first after \d+(\.\d)? ms · prompt \d+ · stop", footer)
        assert browser.text("#announce") == "Answer complete, 33 tokens."
        # The conversation goes on from what was said.
        ask(browser, "second question")
        answered(browser)
        text = bytes(t for t in engine.seen[-1][0] if t < 256).decode()
        order = [text.index(part) for part in ("first question", "Hello there", "second question")]
        assert order == sorted(order)
        # Again: the same question, without the answer that it replaces.
        browser.click(".retry")
        browser.wait(lambda: len(engine.seen) == 3)
        answered(browser)
        assert engine.seen[2][0] == engine.seen[1][0]
        assert browser.run("return document.querySelectorAll('.message').length") == 4


@needs_browser
def test_a_completion_goes_on_with_the_text_as_it_is(browser: Browser):
    engine = ScriptedEngine(says(" upon a time"))
    with serving(engine) as server:
        show(browser, server)
        browser.click(".segments label:last-child")
        ask(browser, "Once")
        assert answered(browser) == " upon a time"
        assert engine.seen[-1][0] == [*b"Once"]
        # A model without a chat template begins there.
        server.context.model.facts = {"chat_template": False}
        show(browser, server)
        assert browser.run("return document.querySelector('#fields').elements.mode.value") == "text"


@needs_browser
@pytest.mark.parametrize("how", ["escape", "button", "new"])
def test_stop_takes_the_request_out_of_the_engine(browser: Browser, how: str):
    engine = ScriptedEngine(lambda *_: [*b"word " * 600, EOS], step_seconds=0.01)
    with serving(engine) as server:
        show(browser, server)
        ask(browser, "go")
        browser.wait_text(f"{LAST} .text", "word word")
        if how == "escape":
            browser.press(ESCAPE)
        else:
            browser.click("#stop" if how == "button" else "#clear")
        assert server.wait_idle()
        assert len(engine.aborted) == 1
        if how == "new":
            assert browser.run("return document.querySelectorAll('.message').length") == 0
        else:
            assert answered(browser).startswith("word word")
            assert "stopped by you" in browser.text(f"{LAST} footer")
        engine.script = says("next")
        ask(browser, "another")  # the page is ready for more
        assert answered(browser) == "next"


@needs_browser
def test_reasoning_is_folded_away(browser: Browser):
    engine = ScriptedEngine(says("<think>Let me see.</think>The answer."))
    with serving(engine, reasoning_parser="qwen3") as server:
        show(browser, server)
        ask(browser, "why")
        assert answered(browser).strip() == "The answer."
        assert "Let me see." in browser.text(f"{LAST} details")


# What a model writes is text


@needs_browser
@pytest.mark.parametrize("mode", ["chat", "text"])
def test_markup_from_the_model_is_text(browser: Browser, mode: str):
    model = ServedModel(
        name="<img src=x onerror=window.pwned=6>",
        tokenizer=TOKENIZER,
        chat_template=ChatTemplate.from_tokenizer(TOKENIZER),
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        defaults={},
        facts={"<script>window.pwned=7</script>": "<script>window.pwned=8</script>"},
    )
    with serving(ScriptedEngine(says(HOSTILE)), model) as server:
        show(browser, server)
        browser.run("document.querySelector('#fields').elements.mode.value = arguments[0]", mode)
        ask(browser, HOSTILE.replace("\n", " "))
        shown = answered(browser)
        # All of it is there, but for the fences' lines and the line breaks around them.
        expected = HOSTILE.replace("```html\n", "").replace("```\n", "")
        assert shown.replace("\n", "") == expected.replace("\n", "")
        assert browser.text(f"{LAST} pre") == '<svg onload="window.pwned=3"></svg>\n'
        made = browser.run(
            "return [...document.querySelectorAll('#log *, #facts *, header *')].map((e) => e.localName)"
        )
        assert not {"img", "script", "a", "b", "style", "iframe"} & set(made)
        assert browser.text("#model") == model.name
        assert browser.run("return window.pwned ?? null") is None


@needs_browser
def test_the_browser_enforces_the_policy(browser: Browser):
    """Even a mistake in the page could not turn text into markup or script."""
    with serving(ScriptedEngine()) as server:
        show(browser, server)
        refused = browser.run(
            """
            const script = document.createElement("script");
            const attempts = [
              () => { document.body.innerHTML = "<p>x</p>"; },
              () => { script.textContent = "window.pwned = 1"; },
              () => { document.body.setAttribute("onclick", "window.pwned = 2"); },
              () => { document.body.click(); document.body.append(script); },
            ];
            return attempts.map((attempt) => { try { attempt(); } catch (error) { return error.name; } });
            """
        )
        assert refused[:2] == ["TypeError", "TypeError"]
        later = "setTimeout(() => { try { eval('window.pwned = 3'); } catch (error) { window.evaluated = error.name; } })"
        browser.run(later)  # what the driver runs itself may evaluate text
        assert browser.wait(lambda: browser.run("return window.evaluated")) == "EvalError"
        assert browser.run("return window.pwned ?? null") is None
        browser.run("fetch('http://127.0.0.1:9/').catch(() => { window.refused = true; })")
        browser.wait(lambda: browser.run("return window.refused"))
        assert any("connect-src" in line for line in browser.console())


@needs_browser
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_fences_are_found_however_the_text_is_cut(browser: Browser, size: int):
    text = "a `b` c\n  ```py\nx = 1\n```\n\n`inline` and ``two\n```not a fence``` \n````\ny\n```\n"
    with serving(ScriptedEngine()) as server:
        show(browser, server)
        found = browser.run(
            """
            const place = document.createElement("div"), writer = new Writer(place);
            for (let i = 0; i < arguments[0].length; i += arguments[1]) writer.push(arguments[0].slice(i, i + arguments[1]));
            writer.release();
            return [...place.childNodes].map((node) => [node.nodeName, node.textContent]);
            """,
            text,
            size,
        )
    assert found == [
        ["#text", "a `b` c"],
        ["PRE", "x = 1\n"],
        ["#text", "`inline` and ``two\n```not a fence``` \n````\ny"],
        ["PRE", ""],
    ]


# Keys


@needs_browser
def test_a_key_is_asked_for_used_and_kept_in_the_tab_alone(browser: Browser, tmp_path: Path):
    (tmp_path / "keys").write_text("sk-right\n")
    with serving(ScriptedEngine(says("let in")), api_keys_file=tmp_path / "keys") as server:
        browser.open(f"{server.url}/")
        browser.wait(lambda: browser.run("return document.querySelector('#key-dialog').open"))
        assert "API key is needed" in browser.text("#key-reason")
        assert browser.run("return document.activeElement.id") == "key-input"
        browser.type("#key-input", "sk-wrong" + ENTER)
        browser.wait_text("#key-reason", "not one of this server's")
        browser.run("document.querySelector('#key-input').value = ''")
        browser.type("#key-input", "sk-right" + ENTER)
        browser.wait_text("#state", "ready")
        assert browser.text("#model") == "scripted"
        ask(browser, "hello")
        assert answered(browser) == "let in"
        kept = browser.run(
            "return [JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie, location.href]"
        )
        assert ["sk-right" in place for place in kept] == [True, False, False, False]
        browser.open(f"{server.url}/")  # the tab remembers
        browser.wait_text("#state", "ready")
        browser.click("#key")
        browser.click("#key-forget")
        browser.wait_text("#key-reason", "API key is needed")
        assert browser.run("return sessionStorage.length") == 0
        browser.press(ESCAPE)
        browser.wait_text("#state", "key needed")
        assert {line.count("401") for line in browser.console()} == {1}  # the console names each refusal


# Charts


@needs_browser
def test_charts_show_the_engine_at_work(browser: Browser):
    engine = ScriptedEngine(lambda *_: [*b"x" * 400, EOS], step_seconds=0.01, max_running=6)
    with serving(engine) as server:
        show(browser, server)
        body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 1000}).encode()
        request = urllib.request.Request(
            f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}
        )

        def client() -> None:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()

        clients = [threading.Thread(target=client) for _ in range(8)]
        for thread in clients:
            thread.start()
        browser.wait_text("#chart-queue .values", "running 6waiting 2")
        assert browser.text("#chart-kv .values").strip() == "100%"

        def numbers(chart: str) -> list[float]:
            return [
                float(n) for n in re.findall(r"(\d+(?:\.\d+)?)", browser.text(f"#chart-{chart} .values b"))
            ]

        browser.wait(lambda: numbers("throughput") and numbers("throughput")[0] > 100)
        browser.wait(lambda: numbers("itl") and 10 <= numbers("itl")[0] < 40)  # steps of 10 ms and more
        assert numbers("ttft")
        drawn = browser.run(
            "return [...document.querySelectorAll('.stroke.s0')].map((path) => path.getAttribute('d').length)"
        )
        assert len(drawn) == 5
        assert min(drawn) > 10
        assert "6, waiting 2" in browser.run(
            "return document.querySelector('#chart-queue .plot').ariaValueText"
        )
        for thread in clients:
            thread.join()
        browser.wait_text("#chart-queue .values", "running 0waiting 0", 20)
        browser.wait_text("#totals", "Completions8")
        assert "Generated tokens3,208" in browser.text("#totals")
        # The past can be read with the keyboard.
        browser.run("document.querySelector('#chart-queue .plot').focus()")
        browser.press(*[LEFT] * 4)
        said = browser.run("return document.querySelector('#chart-queue .plot').ariaValueText")
        assert re.match(r"[345] seconds ago: running \d", said)
        assert re.match(r"[345] s ago", browser.text("#when"))


@needs_browser
def test_a_restarted_server_is_told_from_a_dip(browser: Browser):
    """Counters that fall are another process's: the charts begin anew instead of showing a drop below zero."""
    with serving(ScriptedEngine()) as server:
        show(browser, server)
        rates = browser.run(
            """
            const scrape = (time, tokens) => ({ time, values: parseMetrics(`jaxinfer:generation_tokens_total ${tokens}`) });
            scrapes = [scrape(0, 100)];
            const up = sampleOf(2000, scrape(0, 500).values).generated;
            const down = sampleOf(2000, scrape(0, 5).values).generated;
            return [up, down];
            """
        )
        assert rates == [200, 0]


@needs_browser
def test_latencies_come_from_the_change_of_histograms(browser: Browser):
    with serving(ScriptedEngine()) as server:
        show(browser, server)
        found = browser.run(
            """
            const text = (a, b, c, sum) => `h_bucket{le="0.1"} ${a}\\nh_bucket{le="0.2"} ${b}\\nh_bucket{le="+Inf"} ${c}\\nh_sum ${sum}\\nh_count ${c}`;
            const read = (...args) => latency("h", parseMetrics(text(...args)), parseMetrics(text(50, 50, 50, 1)));
            return [read(50, 50, 50, 1), read(150, 150, 150, 6), read(50, 150, 150, 16), read(50, 50, 60, 101)];
            """
        )
    assert found[0] == {"mean": None, "p95": None}
    assert found[1] == {"mean": 0.05, "p95": pytest.approx(0.095)}
    assert found[2] == {"mean": 0.15, "p95": pytest.approx(0.195)}
    assert found[3] == {"mean": 10, "p95": 0.2}  # beyond the last bound nothing more is known


# Failures


@needs_browser
def test_failures_are_said_where_they_happen(browser: Browser):
    engine = ScriptedEngine(lambda prompt, *_: [*b"half of it", NAN])
    with serving(engine) as server:
        show(browser, server)
        ask(browser, "hello")
        assert answered(browser) == "half of it"
        browser.wait_text(f"{LAST} [role=alert]", "NaN")
        browser.type("[name=extra]", '{"top_k": "x"}')
        ask(browser, "hello")
        browser.wait_text(f"{LAST} [role=alert]", "top_k must be an integer")
        browser.type("[name=extra]", "}")
        ask(browser, "hello")
        browser.wait_text(f"{LAST} [role=alert]", "not a JSON object")
        browser.type("[name=temperature]", "9")
        ask(browser, "refused by the form")
        assert "refused by the form" not in browser.text("#log")
        assert all("400" in line for line in browser.console())
    browser.wait_text("#state", "unreachable")
    browser.run("document.querySelector('#fields').reset()")
    browser.run("document.querySelector('#input').value = ''")
    ask(browser, "anyone there?")
    browser.wait_text(f"{LAST} [role=alert]", "cannot be reached")
    browser.console()


@needs_browser
def test_busy_says_when_to_try_again(browser: Browser):
    engine = ScriptedEngine(says("ok"))
    with serving(engine, max_queued_requests=1) as server:
        show(browser, server)
        engine.gate.clear()
        body = json.dumps({"prompt": "a"}).encode()
        request = urllib.request.Request(
            f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        first = threading.Thread(target=lambda: urllib.request.urlopen(request, timeout=30).close())
        first.start()
        assert server.wait_busy()
        ask(browser, "me too")
        browser.wait_text(f"{LAST} [role=alert]", "try again later (in 1 s)")
        engine.gate.set()
        first.join()
        browser.click(".retry")
        browser.wait_text(f"{LAST} .text", "ok")
        answered(browser)
        assert all("429" in line for line in browser.console())


# For everyone


@needs_browser
def test_everything_can_be_done_with_the_keyboard(browser: Browser):
    with serving(ScriptedEngine(says("fine"))) as server:
        show(browser, server)
        assert browser.run("return document.activeElement.id") == "input"  # one can write at once
        browser.press(*"hi", ENTER)
        assert answered(browser) == "fine"
        browser.press(UP)
        assert browser.run("return document.querySelector('#input').value") == "hi"
        browser.run("document.querySelector('#theme').focus()")
        browser.press("/")
        assert browser.run("return [document.activeElement.id, document.activeElement.value]") == [
            "input",
            "hi",
        ]
        # Controls are what browsers take for such, in an order, and each has a name.
        handles = browser.run(
            "return [...document.querySelectorAll('button, input, textarea, [tabindex=\"0\"]')].filter((e) => e.checkVisibility())"
        )
        assert len(handles) > 25
        assert [h for h in handles if not browser.label(h)] == []
        assert (
            browser.run(
                "return document.querySelectorAll('[tabindex]:not([tabindex=\"0\"], section)').length"
            )
            == 0
        )


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_its_background(browser: Browser, theme: str):
    """WCAG AA: a contrast of at least 4.5 for text."""
    with serving(ScriptedEngine(lambda *_: [*b"fine", NAN])) as server:
        show(browser, server)
        browser.run("setTheme(arguments[0])", theme)
        ask(browser, "hello")
        answered(browser)
        poor = browser.run(
            """
            const parse = (color) => color.match(/[\\d.]+/g).map(Number);
            const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
              .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
            function behind(node) {
              for (; node; node = node.parentElement) {
                const color = parse(getComputedStyle(node).backgroundColor);
                if (color[3] !== 0) return color;
              }
            }
            const poor = [];
            for (const node of document.querySelectorAll("body *")) {
              const text = [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
              if (!text || !node.checkVisibility() || node.matches("script, .hidden, .skip")) continue;
              const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
              const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
              if (contrast < 4.5) poor.push([node.outerHTML.slice(0, 80), contrast]);
            }
            return poor;
            """
        )
        assert poor == []
        assert browser.run("return localStorage.getItem('jaxinfer.theme')") == theme


@needs_browser
@pytest.mark.parametrize(("width", "views"), [(360, 1), (1000, 2), (1440, 3)])
def test_it_fits_every_width(browser: Browser, width: int, views: int):
    with serving(ScriptedEngine(says("word " * 100 + "x" * 300))) as server:
        browser.resize(width, 740)
        show(browser, server)
        ask(browser, "hello")
        answered(browser)
        for view in ("chat", "live", "settings"):
            browser.run("show(arguments[0])", view)
            shown = browser.run(
                "return [...document.querySelectorAll('main > section')].filter((s) => s.checkVisibility()).map((s) => s.id)"
            )
            assert len(shown) == views
            assert view in shown or (views == 2 and view == "chat")
            for box in ("html", "#log", "#live", "#settings"):
                over = "const e = document.querySelector(arguments[0]); return e.scrollWidth - e.clientWidth"
                assert browser.run(over, box) <= 0, (box, view)


@needs_browser
def test_facts_of_the_model_are_shown(browser: Browser):
    model = ServedModel(
        name="tiny",
        tokenizer=TOKENIZER,
        chat_template=ChatTemplate.from_tokenizer(TOKENIZER),
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        defaults={},
        facts={"parameters": 134_515_008, "page_size": 16, "num_pages": 2048, "quantised": "no"},
    )
    with serving(ScriptedEngine(), model) as server:
        show(browser, server)
        facts = browser.text("#facts")
        for fact in (
            "Nametiny",
            "Context4,096 tokens",
            "Parameters135M",
            "KV cache32,768 tokens",
            "quantisedno",
        ):
            assert fact in facts
