"""A page of another site, in the browser that shows the status page, learns nothing about the run."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from farstep.observe.status import PageServer
from tests.observe.status.browser import Browser
from tests.observe.status.simulated_run import SimulatedRun

pytestmark = pytest.mark.slow  # real processes, or learning

ATTACK = """
<title>attack</title><body><script>
const url = %s, results = [];
const note = (name, promise) => promise.then((value) => results.push([name, value]), () => results.push([name, null]));
const element = (tag, attribute) => new Promise((done, fail) => {
  const made = document.createElement(tag);
  made.onload = () => done("loaded"); made.onerror = fail;
  made[attribute] = url.replace("/?", "/data?"); document.body.append(made);
});
const stream = new Promise((done, fail) => {
  const source = new EventSource(url.replace("/?", "/events?"));
  source.onmessage = (event) => done(event.data); source.onerror = () => { source.close(); fail(); };
});
const data = url.replace("/?", "/data?");
Promise.all([
  note("fetch", fetch(data).then((answer) => answer.text())),
  note("no-cors", fetch(data, {mode: "no-cors"}).then((answer) => answer.text())
    .then((text) => text || Promise.reject())),
  note("post", fetch(data, {method: "POST", body: "x"}).then((answer) => answer.text())),
  note("stream", stream), note("script", element("script", "src")), note("image", element("img", "src")),
]).then(() => { window.results = results; });
</script></body>
"""


def test_page_of_another_site_gets_nothing_even_with_the_address(window: Browser) -> None:
    source = SimulatedRun(3, 1)
    server = PageServer(source)

    class Attacker(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (ATTACK % json.dumps(server.url)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Attacker) as attacker:
        thread = threading.Thread(target=attacker.serve_forever)
        thread.start()
        try:
            window.driver.get(f"http://localhost:{attacker.server_address[1]}/")
            window.wait(lambda: window.script("return window.results"))
            assert dict(window.script("return window.results")) == dict.fromkeys(
                ("fetch", "no-cors", "post", "stream", "script", "image")
            )
            assert source.reads == 0
        finally:
            attacker.shutdown()
            thread.join()
            server.close()
