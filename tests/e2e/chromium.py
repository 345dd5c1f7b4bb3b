"""Drives a headless Chromium over its DevTools protocol: pages, clicks, keys, sizes, and what went wrong meanwhile."""

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

START_TIMEOUT_S = 60.0
WAIT_TIMEOUT_S = 60.0
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
KEY_CODES = {"ArrowLeft": 37, "ArrowRight": 39, "ArrowUp": 38, "ArrowDown": 40, "Escape": 27, "Tab": 9, "End": 35}


class Browser:
    """One page, and what it complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []  # errors in the console, exceptions, requests that failed or were refused
        self.hosts: set[str] = set()  # that it asked for anything
        self._socket = socket
        self._num_sent = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def read(self) -> None:
        """Take what the browser says until it closes."""
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            else:
                self._note(told["method"], told["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in {"error", "warning", "assert"}:
                self.complaints.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in {"error", "warning"}:
                self.complaints.append(json.dumps(params["entry"]))
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith("data:"):
                self.hosts.add(params["request"]["url"].split("/")[2])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._num_sent += 1
        answer = self._answers[self._num_sent] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._num_sent, "method": method, "params": params})
        told = await asyncio.wait_for(answer, START_TIMEOUT_S)
        assert "error" not in told, told
        result: dict[str, Any] = told["result"]
        return result

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression; a promise is awaited."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def wait_for(self, expression: str) -> Any:
        """Its value once it is true."""
        for _ in range(int(WAIT_TIMEOUT_S / 0.05)):
            if value := await self.evaluate(expression):
                return value
            await asyncio.sleep(0.05)
        raise AssertionError(f"never true: {expression}")

    async def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        await self.resize(width, height)
        await self.call("Page.navigate", url=url)
        await self.wait_for("document.readyState === 'complete'")

    async def resize(self, width: int, height: int = 900) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def prefer(self, **features: str) -> None:
        """Media features, such as `color_scheme="dark"`."""
        named = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=named)

    async def click(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def drag(self, x: float, y: float, by: float) -> None:
        await self.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1)
        for share in (0.5, 1.0):
            await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + by * share, y=y, button="left")
        await self.call("Input.dispatchMouseEvent", type="mouseReleased", x=x + by, y=y, button="left", clickCount=1)

    async def wheel(self, x: float, y: float, by: float) -> None:
        await self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)

    async def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        code = KEY_CODES.get(key, ord(key[0].upper()))
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def choose_file(self, selector: str, path: Path) -> None:
        document = await self.call("DOM.getDocument")
        node = await self.call("DOM.querySelector", nodeId=document["root"]["nodeId"], selector=selector)
        await self.call("DOM.setFileInputFiles", files=[str(path)], nodeId=node["nodeId"])


@contextmanager
def running_chromium(program: str, directory: Path) -> Iterator[str]:
    """A browser that reaches nothing but 127.0.0.1, its files below the directory; yields its DevTools URL."""
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    isolated = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--mute-audio",
        NO_NETWORK,
    ]
    profile = directory / "profile"
    command = [program, *isolated, *quiet, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    with (directory / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{_port(profile / 'DevToolsActivePort')}"
    finally:
        process.terminate()  # and not kill: its children would go on writing into the profile
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(path: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if path.exists() and (port := path.read_text().partition("\n")[0]):
            return port
        time.sleep(0.05)
    raise AssertionError("the browser did not start")


@asynccontextmanager
async def browsing(devtools_url: str) -> AsyncIterator[Browser]:
    """A new page, in front of the others."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{devtools_url}/json/new?about:blank") as answer:
            target = json.loads(await answer.text())
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            browser = Browser(socket)
            reader = asyncio.create_task(browser.read())
            for domain in ("Page", "Runtime", "Log", "Network"):
                await browser.call(f"{domain}.enable")
            yield browser
            reader.cancel()
        async with session.get(f"{devtools_url}/json/close/{target['id']}"):
            pass
