#!/usr/bin/env python3
"""Opens a page in headless Chromium, over its debugging pipe, and looks at it.

  drive.py URL [--dark] [--phone] [--shot FILE.png] [--wait JS] [--run COMMAND --then JS]
           [--eval JS] [--seconds N]

Waits until the expression of --wait is true (default: the page has pools), then for --run and its
--then, prints the value of
--eval (default: the text of the page), and writes a screenshot of the whole page.
"""
import argparse, base64, json, os, shutil, subprocess, sys, tempfile, time


class Browser:
    def __init__(self, profile):
        down_r, down_w = os.pipe()
        up_r, up_w = os.pipe()

        def descriptors():  # Chromium reads commands on 3 and answers on 4.
            read, write = os.dup(down_r), os.dup(up_w)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self.process = subprocess.Popen(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--no-first-run", "--remote-debugging-pipe", "--user-data-dir=" + profile, "about:blank"],
            preexec_fn=descriptors, close_fds=False, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(down_r)
        os.close(up_w)
        self.down, self.up, self.number, self.session = down_w, up_r, 0, None
        self.rest = b""

    def read(self):
        while b"\0" not in self.rest:
            some = os.read(self.up, 1 << 16)
            if not some:
                raise SystemExit("drive.py: Chromium ended")
            self.rest += some
        one, self.rest = self.rest.split(b"\0", 1)
        return json.loads(one)

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.down, json.dumps(message).encode() + b"\0")
        while True:
            got = self.read()
            if got.get("id") == self.number:
                if "error" in got:
                    raise SystemExit(f"drive.py: {method}: {got['error']}")
                return got["result"]

    def eval(self, text):
        got = self.call("Runtime.evaluate", expression=text, returnByValue=True)
        if "exceptionDetails" in got:
            raise SystemExit(f"drive.py: {text}: {got['exceptionDetails']}")
        return got["result"].get("value")


def main():
    take = argparse.ArgumentParser()
    take.add_argument("url")
    take.add_argument("--dark", action="store_true")
    take.add_argument("--phone", action="store_true")
    take.add_argument("--shot")
    take.add_argument("--wait", default="document.querySelectorAll('#pools section').length > 0")
    take.add_argument("--run", help="a shell command, once --wait holds")
    take.add_argument("--then", default="true", help="what is waited for after --run")
    take.add_argument("--eval", default="document.body.innerText")
    take.add_argument("--seconds", type=float, default=20)
    asked = take.parse_args()
    profile = tempfile.mkdtemp(prefix="volward-browser.")
    browser = Browser(profile)
    try:
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        browser.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        width, height = (390, 844) if asked.phone else (1280, 900)
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                     deviceScaleFactor=1, mobile=asked.phone)
        browser.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if asked.dark else "light"}])
        browser.call("Page.navigate", url=asked.url)

        def until(wanted):
            end = time.monotonic() + asked.seconds
            while not browser.eval(wanted):
                if time.monotonic() > end:
                    print(browser.eval("document.body.innerText"))
                    sys.exit(f"drive.py: not within {asked.seconds} s: {wanted}")
                time.sleep(0.1)

        until(asked.wait)
        if asked.run:
            subprocess.run(asked.run, shell=True, check=True, stdout=subprocess.DEVNULL)
            until(asked.then)
        print(browser.eval(asked.eval))
        if asked.shot:
            shot = browser.call("Page.captureScreenshot", captureBeyondViewport=not asked.phone)
            with open(asked.shot, "wb") as file:
                file.write(base64.b64decode(shot["data"]))
    finally:
        browser.process.terminate()
        try:
            browser.process.wait(10)
        except subprocess.TimeoutExpired:
            browser.process.kill()
            browser.process.wait()
        shutil.rmtree(profile, ignore_errors=True)


main()
