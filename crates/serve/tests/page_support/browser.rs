//! Controls the browser Chromium in tests, through chromedriver, which accepts WebDriver's JSON commands over HTTP.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use conformance::patient;
use serde_json::{Value, json};

/// Time limit for waiting for the page to change.
const TEST_TIMEOUT: Duration = Duration::from_secs(30);

fn program(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Returns the reason why no browser can be controlled on this machine, or `None` if a browser can be controlled.
pub(crate) fn missing() -> Option<String> {
    let names = ["chromium", "chromedriver"];
    let missing: Vec<&str> = names.into_iter().filter(|name| program(name).is_none()).collect();
    (!missing.is_empty()).then(|| format!("not installed: {}; scripts/setup test installs it", missing.join(", ")))
}

/// A browser and its chromedriver. All test cases share one browser session, and each case opens its own windows.
pub(crate) struct Driver {
    child: Child,
    port: u16,
    session: String,
    /// The session's first window, which stays open because a session without a window cannot open a new window.
    first: Value,
    /// The folder for the browser's temporary files, which is removed when the `Driver` is dropped.
    folder: tempfile::TempDir,
}

impl Driver {
    pub(crate) fn start() -> Self {
        // Another process may take the chosen port before chromedriver listens on the port. chromedriver then exits.
        let mut driver = (0..5).find_map(|_| Self::try_start()).expect("chromedriver starts");
        let profile = driver.folder.path().join("profile");
        let arguments = [
            "--headless=new".to_owned(),
            "--no-sandbox".to_owned(),
            "--disable-gpu".to_owned(),
            "--disable-dev-shm-usage".to_owned(),
            // The browser must send no requests except those for the page.
            "--disable-background-networking".to_owned(),
            "--hide-scrollbars".to_owned(),
            format!("--user-data-dir={}", profile.display()),
        ];
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}, "unhandledPromptBehavior": "ignore",
        }}});
        let session = driver.call("POST", "/session", &wanted).unwrap();
        driver.session = session["sessionId"].as_str().unwrap().to_owned();
        driver.first = driver.in_session("GET", "/window", &Value::Null).unwrap();
        driver
    }

    fn try_start() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let child = Command::new("chromedriver")
            .arg("--port=0")
            .stdout(std::fs::File::create(&log).unwrap())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut driver = Self { child, port: 0, session: String::new(), first: Value::Null, folder };
        let until = Instant::now() + patient(TEST_TIMEOUT);
        while driver.port == 0 {
            if Instant::now() > until || driver.child.try_wait().unwrap().is_some() {
                return None;
            }
            std::thread::sleep(Duration::from_millis(50));
            let text = std::fs::read_to_string(&log).unwrap();
            let port = text.split_once("successfully on port ").and_then(|(_, rest)| rest.split_once('.'));
            driver.port = port.and_then(|(port, _)| port.parse().ok()).unwrap_or(0);
        }
        Some(driver)
    }

    /// Selects the window that receives the session's next commands.
    fn choose(&self, handle: &Value) -> Result<Value, String> {
        self.in_session("POST", "/window", &json!({"handle": handle}))
    }

    fn in_session(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        self.call(method, &format!("/session/{}{path}", self.session), body)
    }

    fn call(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        let body = if method == "POST" { body.to_string() } else { String::new() };
        // A failed call returns an error instead of panicking, because `drop` makes calls even after chromedriver has
        // exited.
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).map_err(|error| error.to_string())?;
        stream.set_read_timeout(Some(patient(Duration::from_secs(60)))).unwrap();
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\
             Connection: close\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut stream = BufReader::new(stream);
        let (mut head, mut length) = (String::new(), 0);
        // chromedriver keeps the connection open even if a request asks chromedriver to close the connection.
        while !head.ends_with("\r\n\r\n") {
            let begun = head.len();
            assert!(stream.read_line(&mut head).unwrap() > 0, "chromedriver said {head:?}");
            let line = head[begun..].to_ascii_lowercase();
            length = line.strip_prefix("content-length:").map_or(length, |length| length.trim().parse().unwrap());
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).unwrap();
        let mut answer: Value = serde_json::from_slice(&body).unwrap();
        let value = answer["value"].take();
        if head.starts_with("HTTP/1.1 200") { Ok(value) } else { Err(value["message"].to_string()) }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // Deleting the session ends the browser.
        _ = self.in_session("DELETE", "", &Value::Null);
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// The size and appearance of a browser window.
#[derive(Clone, Copy)]
pub(crate) struct Look {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) colours: &'static str,
}

pub(crate) const WIDE: Look = Look { width: 1440, height: 900, colours: "light" };

/// A browser window of one test case. A session's commands go to the window that was opened last. Dropping the window
/// checks the browser's console for messages.
pub(crate) struct Window<'d> {
    driver: &'d Driver,
    handle: Value,
}

impl<'d> Window<'d> {
    pub(crate) fn open(driver: &'d Driver, scan: Look) -> Self {
        let Look { width, height, colours } = scan;
        let opened = driver.in_session("POST", "/window/new", &json!({"type": "window"})).unwrap();
        let window = Self { driver, handle: opened["handle"].clone() };
        driver.choose(&window.handle).unwrap();
        // Discards the console lines that an earlier window has printed.
        window.console();
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        window.devtools("Emulation.setDeviceMetricsOverride", &metrics);
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": colours}]});
        window.devtools("Emulation.setEmulatedMedia", &features);
        window
    }

    fn call(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        self.driver.in_session(method, path, body)
    }

    fn devtools(&self, command: &str, parameters: &Value) {
        self.call("POST", "/goog/cdp/execute", &json!({"cmd": command, "params": parameters})).unwrap();
    }

    pub(crate) fn go(&self, url: &str) {
        self.call("POST", "/url", &json!({"url": url})).unwrap();
    }

    /// Runs a script in the page and returns the script's result.
    pub(crate) fn run(&self, script: &str) -> Value {
        let reported = self.call("POST", "/execute/sync", &json!({"script": script, "args": []}));
        reported.unwrap_or_else(|error| panic!("{error}\nin {script}"))
    }

    /// Returns the value of a JavaScript expression in the page.
    pub(crate) fn value(&self, expression: &str) -> Value {
        self.run(&format!("return ({expression});"))
    }

    /// Returns the text of the page that a person can see.
    pub(crate) fn text(&self) -> String {
        self.value("document.body.innerText").as_str().unwrap().to_owned()
    }

    /// Waits until a JavaScript expression is true. The expression may refer to elements that do not exist yet.
    pub(crate) fn wait(&self, expression: &str) {
        let until = Instant::now() + patient(TEST_TIMEOUT);
        let tried = format!("(() => {{ try {{ return Boolean({expression}); }} catch {{ return false; }} }})()");
        while self.value(&tried) != Value::Bool(true) {
            assert!(Instant::now() < until, "waited for {expression}; the page says:\n{}", self.text());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub(crate) fn wait_text(&self, text: &str) {
        self.wait(&format!("document.body.innerText.includes({})", json!(text)));
    }

    /// Presses keys, one after the other. Special keys such as Enter are written with WebDriver's codes, for example
    /// `\u{e007}`.
    pub(crate) fn press(&self, keys: &str) {
        let presses: Vec<Value> = keys
            .chars()
            .flat_map(|key| ["keyDown", "keyUp"].map(|kind| json!({"type": kind, "value": key.to_string()})))
            .collect();
        self.call("POST", "/actions", &json!({"actions": [{"type": "key", "id": "keys", "actions": presses}]}))
            .unwrap();
    }

    /// Moves the mouse to a position in the window.
    pub(crate) fn point(&self, x: i64, y: i64) {
        let to = json!({"type": "pointerMove", "duration": 0, "x": x, "y": y});
        let mouse = json!({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [to]});
        self.call("POST", "/actions", &json!({"actions": [mouse]})).unwrap();
    }

    /// Returns whether the page shows a JavaScript dialog. A successful script injection would show a JavaScript
    /// dialog.
    pub(crate) fn has_dialog(&self) -> bool {
        self.call("GET", "/alert/text", &Value::Null).is_ok()
    }

    /// Returns the lines of the browser's console. The browser prints a line for each script that failed and each
    /// request that the security policy forbade.
    pub(crate) fn console(&self) -> Vec<String> {
        let reported = self.call("POST", "/se/log", &json!({"type": "browser"})).unwrap();
        reported.as_array().unwrap().iter().map(|line| line["message"].as_str().unwrap().to_owned()).collect()
    }

    /// Saves a screenshot in the folder named by the environment variable PAGE_PICTURES, if this variable is set.
    pub(crate) fn picture(&self, name: &str) {
        let Some(folder) = std::env::var_os("PAGE_PICTURES") else { return };
        let picture = self.call("GET", "/screenshot", &Value::Null).unwrap();
        let file = Path::new(&folder).join(format!("{name}.png"));
        let mut decoding = Command::new("base64")
            .arg("-d")
            .stdin(Stdio::piped())
            .stdout(std::fs::File::create(file).unwrap())
            .spawn()
            .unwrap();
        decoding.stdin.take().unwrap().write_all(picture.as_str().unwrap().as_bytes()).unwrap();
        decoding.wait().unwrap();
    }
}

impl Drop for Window<'_> {
    fn drop(&mut self) {
        // A later daemon may use the same port, and its web page would find the data that this daemon's page has stored
        // in the browser.
        let kept = json!({"script": "localStorage.clear()", "args": []});
        _ = self.driver.choose(&self.handle);
        _ = self.call("POST", "/execute/sync", &kept);
        _ = self.call("DELETE", "/window", &Value::Null);
        _ = self.driver.choose(&self.driver.first);
    }
}
