//! Tests the daemon's HTTP server with a plain TCP client instead of a browser.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod page_support;

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use conformance::patient;
use ipam_core::assign::RequestedAddresses;
use page_support::client::{connect, get, json, send, wait_for};
use page_support::{Daemon, SCRIPT, add, container, empty, many_blocks, shown, three_pools};
use serde_json::Value;
use serve::accept::Listener;
use serve::http::{ClientLimits, serve};

#[test]
fn page_answers_only_to_names_of_daemon() {
    let daemon = Daemon::new(async || empty());
    let port = daemon.address.port();
    let status = |line: &str, host: &str| {
        send(&daemon, &format!("GET {line} HTTP/1.1\r\n{host}Connection: close\r\n\r\n")).status
    };
    for host in
        [format!("127.0.0.1:{port}"), "localhost".into(), "[::1]:9".into(), "IPAM.lan".into(), "127.9.9.9".into()]
    {
        assert_eq!(status("/health", &format!("Host: {host}\r\n")), 200, "{host}");
    }
    for host in ["evil.example", "127.0.0.1.evil.example", "", "localhost:80@evil.example", "192.168.1.1"] {
        for path in ["/", "/metrics", "/api/overview", "/nothing"] {
            assert_eq!(status(path, &format!("Host: {host}\r\n")), 421, "{host} {path}");
        }
    }
    assert_eq!(status("/health", ""), 421, "no host at all");
    assert_eq!(status("/health", "Host: localhost\r\nHost: evil.example\r\n"), 421, "two hosts");
    assert_eq!(status("http://evil.example/health", "Host: localhost\r\n"), 421, "another host in the request line");
    let old = send(&daemon, "GET /health HTTP/1.0\r\n\r\n");
    assert_eq!(old.status, 421, "HTTP/1.0 without a host");
}

#[test]
fn page_answers_have_headers_that_confine_browser() {
    let daemon = Daemon::new(async || empty());
    let policy = "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
                  connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    for path in
        ["/", "/page.js", "/style.css", "/api/overview", "/api/nothing", "/nothing", "/health", "/version", "/metrics"]
    {
        let got = get(&daemon, path);
        for line in [
            policy,
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
            "cross-origin-resource-policy: same-origin",
        ] {
            assert!(got.head.lines().any(|found| found == line), "{path}: {line} in\n{}", got.head);
        }
        assert!(!got.head.contains("access-control-"), "{path}: no CORS");
        let keeps = if ["/", "/page.js", "/style.css"].contains(&path) { "no-cache" } else { "no-store" };
        assert!(got.head.contains(&format!("cache-control: {keeps}")), "{path}: {}", got.head);
    }
    let foreign = send(&daemon, "GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n");
    assert!(foreign.head.contains("content-security-policy:") && !foreign.body.contains('<'), "{}", foreign.body);
}

#[test]
fn page_is_read_only_and_says_so() {
    let daemon = Daemon::new(async || empty());
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"] {
        for path in ["/", "/api/overview", "/metrics"] {
            let request = format!(
                "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            );
            let got = send(&daemon, &request);
            assert_eq!(got.status, 405, "{method} {path}");
            assert!(got.head.contains("allow: get, head"), "{}", got.head);
        }
    }
    let got = send(&daemon, "HEAD /page.js HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    assert_eq!((got.status, got.body.as_str()), (200, ""));
    assert_eq!(send(&daemon, "HEAD /api/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").status, 200);
}

#[test]
fn page_error_is_short_when_path_is_missing() {
    let daemon = Daemon::new(async || empty());
    for path in
        ["/nothing", "/index.html", "/../etc/passwd", "/%2e%2e/etc/passwd", "/page.js/", "//", "/src/http/mod.rs"]
    {
        let got = get(&daemon, path);
        assert_eq!((got.status, got.body.trim()), (404, "there is nothing here"), "{path}");
    }
    let refused = [
        ("/api/nothing", 404),
        ("/api/address", 400),
        ("/api/address?ip=x", 400),
        ("/api/block?cidr=10.0.0.0/99", 400),
        ("/api/blocks?pool=none", 404),
        ("/api/blocks?from=-1", 400),
        ("/api/search?q=%20", 400),
        ("/api/history?of=x&kind=planet", 400),
        ("/api/events?after=x", 400),
    ];
    for (path, status) in refused {
        let got = get(&daemon, path);
        assert_eq!(got.status, status, "{path}");
        assert!(got.json()["error"].is_string(), "{path}");
    }
}

#[test]
fn page_file_is_not_sent_again_when_cached() {
    let daemon = Daemon::new(async || empty());
    let first = get(&daemon, "/page.js");
    let tag = first.head.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap().to_owned();
    let request =
        format!("GET /page.js HTTP/1.1\r\nHost: localhost\r\nIf-None-Match: {tag}\r\nConnection: close\r\n\r\n");
    let second = send(&daemon, &request);
    assert_eq!((first.status, second.status, second.body.as_str()), (200, 304, ""));
}

#[test]
fn page_has_health_version_and_metrics() {
    let daemon = Daemon::new(three_pools);
    assert_eq!(get(&daemon, "/health").body, "ok\n");
    let version = json(&daemon, "/version");
    assert_eq!((&version["name"], &version["engine"]), (&"margay".into(), &"redb".into()));
    daemon.metrics.observe_add(Duration::from_millis(4));
    // The daemon may not have noticed yet that the test has closed its previous connections.
    let until = Instant::now() + patient(Duration::from_secs(10));
    let got = loop {
        let got = get(&daemon, "/metrics");
        if got.body.contains("\nmargay_serve_http_connections 1\n") || Instant::now() > until {
            break got;
        }
    };
    assert!(
        got.head.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"),
        "{}",
        got.head
    );
    for line in [
        "margay_pool_size_addresses{pool=\"default\",cidr=\"10.65.0.0/22\"} 1024",
        "margay_pool_addresses{pool=\"default\",cidr=\"10.65.0.0/22\",state=\"in-use\"} 131",
        "margay_pool_addresses{pool=\"default\",cidr=\"10.65.0.0/22\",state=\"resting\"} 20",
        "margay_nodes 3",
        "margay_serve_add_seconds_count 1",
        "margay_serve_http_connections 1",
        "margay_serve_store_read 1",
    ] {
        assert!(got.body.lines().any(|found| found == line), "{line} in\n{}", got.body);
    }
    // The test assigned 131 addresses in five days, and 765 addresses are free or in cooldown.
    let days = got
        .body
        .lines()
        .find_map(|line| line.strip_prefix("margay_pool_days_until_full{pool=\"default\",cidr=\"10.65.0.0/22\"} "));
    assert!((29.0..29.4).contains(&days.unwrap().parse::<f64>().unwrap()), "{}", got.body);
    assert!(got.body.ends_with("\n# EOF\n"), "the form of OpenMetrics");
    let headings: Vec<&str> = got.body.lines().filter(|line| line.starts_with("# TYPE ")).collect();
    let unique: std::collections::BTreeSet<_> = headings.iter().collect();
    assert_eq!(unique.len(), headings.len(), "no name is there twice");
}

#[test]
fn page_overview_has_what_it_shows() {
    let daemon = Daemon::new(three_pools);
    let overview = json(&daemon, "/api/overview");
    let pool = &overview["pools"][0];
    assert_eq!((&pool["name"], &pool["used"], &pool["resting"]), (&"default".into(), &131.into(), &20.into()));
    assert_eq!((&pool["capacity"], &pool["reserved"]), (&"1024".into(), &"128".into()));
    let sum: u64 = ["used", "borrowed", "resting"].iter().map(|name| pool[name].as_u64().unwrap()).sum();
    let free: u64 = pool["free"].as_str().unwrap().parse().unwrap();
    assert_eq!(sum + 128 + free, 1024);
    assert_eq!(overview["nodes_total"], 3);
    let forecast = json(&daemon, "/api/forecast");
    assert!((forecast["history_seconds"].as_u64().unwrap() + 60) / 86_400 == 5, "{forecast}");
    // The test assigned 131 addresses in five days, and 765 addresses are free or in cooldown.
    let (kind, days) = (&forecast["pools"][0]["kind"], forecast["pools"][0]["days"].as_f64().unwrap());
    assert!(kind == "filling" && (29.0..29.4).contains(&days), "{forecast}");

    let blocks = json(&daemon, "/api/blocks?pool=default");
    assert_eq!(blocks["total"].as_u64().unwrap(), blocks["blocks"].as_array().unwrap().len() as u64);
    let cidr = blocks["blocks"][0][0].as_str().unwrap();
    let block = json(&daemon, &format!("/api/block?cidr={}", cidr.replace('/', "%2F")));
    assert_eq!((block["addresses"].as_array().unwrap().len(), &block["pool"]), (64, &"default".into()));
    let absent = json(&daemon, "/api/block?cidr=10.65.2.64/26");
    assert_eq!((&absent["exists"], &absent["pool"]), (&false.into(), &"default".into()));

    let search = |text: &str| json(&daemon, &format!("/api/search?q={text}"));
    let found = search("script");
    let holder = &found["addresses"][0]["holder"];
    assert_eq!((&holder["pod"], found["addresses"].as_array().unwrap().len()), (&SCRIPT.into(), 1));
    let ip = found["addresses"][0]["ip"].as_str().unwrap().to_owned();
    for text in
        [ip.as_str(), "WEB-7D9F", "data/db-0", "worker-2", &container(30)[..12], "edge", "10.65.0.0/22", "k8s-pod"]
    {
        let found = search(text);
        assert!(["pools", "blocks", "nodes", "addresses"].iter().any(|kind| found[kind][0] != Value::Null), "{text}");
    }
    assert_eq!(search("10.65.2.70")["addresses"][0]["use"], "free", "free addresses are found as well");
    assert_eq!(search("nothing-like-this")["addresses"], Value::Array(vec![]));

    let address = json(&daemon, &format!("/api/address?ip={ip}"));
    assert_eq!(
        (&address["use"], &address["holder"]["pod"], &address["pool"]),
        (&"used".into(), &SCRIPT.into(), &"default".into())
    );
    assert_eq!(address["attributes"]["namespace"], "shop");
    let history = |kind: &str, of: &str| json(&daemon, &format!("/api/history?kind={kind}&of={of}"));
    assert_eq!(history("address", &ip)["events"][0]["event"], "assigned");
    let words = |reported: &Value| -> Vec<String> {
        reported["events"].as_array().unwrap().iter().map(|event| event["event"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(words(&history("container", &container(3))), ["resting", "assigned"]);
    assert_eq!(words(&history("pod", "shop/cart-55c85")), ["resting", "assigned"]);
    assert_eq!(words(&history("pod", "data/cart-55c85")), [""; 0]);
    assert!(words(&history("node", "worker-2")).len() > 50);
    let held = json(&daemon, "/api/held?kind=node&of=worker-2");
    assert!(held["addresses"].as_array().unwrap().len() > 40 && held["blocks"][0]["used"].as_u64().unwrap() > 0);

    let problems = json(&daemon, "/api/problems");
    let finding = &problems["findings"][0];
    assert_eq!((&finding["code"], &finding["severity"]), (&"HND-04".into(), &"problem".into()));
    let command = "margay ipam check --store redb:///var/lib/margay/ipam.redb --repair HND-04 --apply";
    assert_eq!(finding["command"], command);
}

#[test]
fn page_fits_ten_thousand_blocks_in_small_answer() {
    let daemon = Daemon::new(async || many_blocks(10_001).await);
    let got = get(&daemon, "/api/blocks?pool=large");
    assert!(got.body.len() < 600_000, "{} bytes", got.body.len());
    assert_eq!((got.json()["blocks"].as_array().unwrap().len(), &got.json()["total"]), (10_000, &10_001.into()));
    let rest = json(&daemon, "/api/blocks?pool=large&from=10000");
    assert_eq!(rest["blocks"].as_array().unwrap().len(), 1);
    assert!(json(&daemon, "/api/search?q=pod-")["more"].as_bool().unwrap(), "a search ends when it has enough");
}

#[test]
fn page_drops_client_with_unfinished_request() {
    let limits = ClientLimits { headers: Duration::from_millis(300), ..ClientLimits::default() };
    let daemon = Daemon::with_limits(async || empty(), limits);
    for begun in ["", "GET / HT", "GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "] {
        let mut stream = connect(&daemon);
        stream.write_all(begun.as_bytes()).unwrap();
        let mut rest = Vec::new();
        // The daemon closes the connection after a malformed request, with or without an answer.
        assert!(stream.read_to_end(&mut rest).is_ok_and(|_| !rest.starts_with(b"HTTP/1.1 200")), "{begun:?}");
    }
    let long = format!("GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: {}\r\n\r\n", "x".repeat(100_000));
    let mut stream = connect(&daemon);
    _ = stream.write_all(long.as_bytes());
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => assert!(answer.starts_with(b"HTTP/1.1 431"), "{}", String::from_utf8_lossy(&answer)),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "what was not read takes the answer with it");
        }
    }
    let many = format!("GET / HTTP/1.1\r\nHost: localhost\r\n{}\r\n", "X-Many: 1\r\n".repeat(100));
    assert_eq!(send(&daemon, &many).status, 431);
    assert_eq!(get(&daemon, "/health").status, 200);
}

#[test]
fn page_tells_client_when_connections_are_too_many() {
    let limits = ClientLimits { connections: 4, ..ClientLimits::default() };
    let daemon = Daemon::with_limits(async || empty(), limits);
    let mut held: Vec<TcpStream> = (0..4).map(|_| connect(&daemon)).collect();
    wait_for("four connections", || daemon.metrics.viewers() == 4);
    for _ in 0..20 {
        let got = get(&daemon, "/health");
        assert_eq!(got.status, 503);
        assert!(got.head.contains("connection: close") && got.body.contains("too many connections"), "{}", got.body);
    }
    // A thousand more clients do not disturb the connected clients.
    let crowd: Vec<_> = (0..1000).filter_map(|_| TcpStream::connect(daemon.address).ok()).collect();
    drop(crowd);
    held[0].write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut line = String::new();
    BufReader::new(&mut held[0]).read_line(&mut line).unwrap();
    assert_eq!(line, "HTTP/1.1 200 OK\r\n");
    held.clear();
    wait_for("room", || get(&daemon, "/health").status == 200);
}

#[test]
fn page_on_unix_socket_takes_any_host() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("http.sock");
    let listener = {
        let _in = runtime.enter();
        tokio::net::UnixListener::bind(&path).unwrap()
    };
    let shown = Arc::new(shown(&empty()));
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = runtime.spawn(serve(Listener::Unix(listener), shown, async move { _ = stopped.await }));
    let mut stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
    stream.write_all(b"GET /version HTTP/1.1\r\nHost: anything.example\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    drop(stop);
    runtime.block_on(serving).unwrap().unwrap();
}

/// Serves a store for a person to view, when run with
/// `PAGE_PORT=8080 PAGE_STORE=three cargo test -p margay-serve --test page_http -- page_by_hand --ignored`.
/// The variable PAGE_STORE is `empty`, `three` or `many`.
#[test]
#[ignore = "for a person, who ends it"]
fn page_by_hand() {
    let port = std::env::var("PAGE_PORT").map_or(8080, |port| port.parse().unwrap());
    let store = std::env::var("PAGE_STORE").unwrap_or_default();
    let fill = async || match store.as_str() {
        "empty" => empty(),
        "many" => many_blocks(10_000).await,
        _ => three_pools().await,
    };
    let daemon = Daemon::at(fill, ClientLimits::default(), port);
    for number in 10_000.. {
        std::thread::sleep(Duration::from_secs(5));
        if store.is_empty() {
            daemon.run(add(
                &daemon.ipam,
                "worker-2",
                &container(number),
                &format!("live-{number}"),
                RequestedAddresses::any(1, 0),
                &["default"],
            ));
        }
    }
}
