//! An HTTP client that sends requests byte for byte as the test writes them.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use conformance::patient;
use serde_json::Value;

use super::Daemon;

/// An HTTP answer: its status, its head in lower case, and its body.
pub(crate) struct Got {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Got {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}

pub(crate) fn connect(daemon: &Daemon) -> TcpStream {
    let stream = TcpStream::connect(daemon.address).unwrap();
    stream.set_read_timeout(Some(patient(Duration::from_secs(30)))).unwrap();
    stream
}

/// Sends an HTTP request byte for byte, and reads until the daemon closes the connection.
pub(crate) fn send(daemon: &Daemon, request: &str) -> Got {
    let mut stream = connect(daemon);
    stream.write_all(request.as_bytes()).unwrap();
    read_to_end(stream)
}

pub(crate) fn read_to_end(mut stream: TcpStream) -> Got {
    let mut text = Vec::new();
    stream.read_to_end(&mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Got { status, head: head.to_lowercase(), body: body.to_owned() }
}

pub(crate) fn get(daemon: &Daemon, path: &str) -> Got {
    send(daemon, &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
}

pub(crate) fn json(daemon: &Daemon, path: &str) -> Value {
    let got = get(daemon, path);
    assert_eq!(got.status, 200, "{path}: {}", got.body);
    got.json()
}

pub(crate) fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + patient(Duration::from_secs(20));
    while !is_so() {
        assert!(Instant::now() < until, "waited for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
