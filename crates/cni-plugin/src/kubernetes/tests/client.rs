//! Tests of the Kubernetes API requests of the main plugin, with and without responses of the server.

use std::time::{Duration, Instant};

use agent::CniError;

use super::{Reply, Server, TOKEN, client, reported};

const LONG: Duration = Duration::from_secs(20);
const NAMESPACE: &str = r#"{"kind":"Namespace","metadata":{"labels":{"team":"x"},"annotations":{"a":"b"}}}"#;

/// Starts a server that sends `reply`, sends one request to it, and returns the request's error.
async fn error(reply: Reply) -> CniError {
    client(&Server::saying(reply)).namespace("shop", LONG).await.unwrap_err()
}

#[tokio::test]
async fn client_uses_one_connection_for_all_requests() {
    let server = Server::start(|_, head| match head.split(' ').nth(1).unwrap() {
        "/api/v1/nodes/node1" => Reply::ok(r#"{"metadata":{},"spec":{"podCIDRs":["10.70.0.0/24","fd00:70::/64"]}}"#),
        "/api/v1/namespaces/shop" => Reply::ok(NAMESPACE),
        "/api/v1/namespaces/shop/pods/pod1" => {
            Reply::ok(r#"{"metadata":{"labels":{"app":"web"}},"spec":{"nodeName":"n"}}"#)
        }
        "/version?timeout=2s" => Reply::ok(r#"{"major":"1","minor":"34"}"#),
        other => panic!("{other}"),
    });
    let mut client = client(&server);
    assert_eq!(client.node_pod_cidrs("node1", LONG).await.unwrap(), ["10.70.0.0/24", "fd00:70::/64"]);
    let namespace = client.namespace("shop", LONG).await.unwrap();
    assert_eq!((namespace.name.as_str(), &*namespace.labels["team"], &*namespace.annotations["a"]), ("shop", "x", "b"));
    assert_eq!(client.pod("shop", "pod1", LONG).await.unwrap().labels["app"], "web");
    client.version(LONG).await.unwrap();
    assert_eq!(server.connections(), 1);
    for head in server.heads() {
        for line in ["accept: application/json", "user-agent: margay/", &format!("authorization: Bearer {TOKEN}")] {
            assert!(head.contains(&format!("\r\n{line}")), "{head}");
        }
        assert!(head.contains(&format!("\r\nhost: {}\r\n", server.address)), "{head}");
    }
}

#[tokio::test]
async fn client_reconnects_when_connection_was_closed() {
    let closing = Server::saying(Reply::Say("200 OK".into(), "connection: close\r\n".into(), NAMESPACE.into()));
    // The test server closes the connection after the second request, without a response.
    let rude = Server::start(|number, _| if number == 1 { Reply::Bytes(Vec::new()) } else { Reply::ok(NAMESPACE) });
    for server in [&closing, &rude] {
        let mut client = client(server);
        for _ in 0..3 {
            client.namespace("shop", LONG).await.unwrap();
        }
    }
    assert_eq!((closing.connections(), rude.connections()), (3, 2));
    // A request that fails on a new connection is not retried.
    let server = Server::saying(Reply::Bytes(Vec::new()));
    let (code, text) = reported(client(&server).namespace("shop", LONG).await.unwrap_err());
    assert!(code == 11 && text.starts_with(&format!("the connection to {} broke: ", server.url())), "{code} {text}");
    server.only_head();
}

#[tokio::test]
async fn client_tells_refusals_in_words_of_api() {
    let forbidden = "pods \"x\" is forbidden: User \"calico\" cannot get resource \"pods\"";
    for (status, message, code) in [
        ("404 Not Found", "namespaces \"shop\" not found", 999),
        ("403 Forbidden", forbidden, 999),
        ("401 Unauthorized", "Unauthorized", 999),
        ("500 Internal Server Error", "Internal error occurred: etcdserver: request timed out", 11),
        ("429 Too Many Requests", "Too many requests, please try again later.", 11),
    ] {
        assert_eq!(reported(error(Reply::refusal(status, message)).await), (code, message.to_owned()));
    }
    assert_eq!(reported(error(Reply::status("401 Unauthorized", "no")).await), (999, "Unauthorized".to_owned()));
    let missing = "the server could not find the requested resource (get namespaces shop)";
    assert_eq!(
        reported(error(Reply::status("404 Not Found", "404 page not found\n")).await),
        (999, missing.to_owned())
    );
    let server = Server::saying(Reply::status("503 Service Unavailable", "<html>"));
    let text = format!("{} answered 503 Service Unavailable", server.url());
    assert_eq!(reported(client(&server).namespace("shop", LONG).await.unwrap_err()), (11, text));
    let server = Server::saying(Reply::status("302 Found", "elsewhere"));
    let text = format!("{} answered 302 Found", server.url());
    assert_eq!(reported(client(&server).version(LONG).await.unwrap_err()), (999, text));
}

#[tokio::test]
async fn client_error_hides_secrets_that_server_repeats() {
    let text = reported(error(Reply::refusal("403 Forbidden", &format!("what is {TOKEN}? what is {TOKEN}?"))).await).1;
    assert_eq!(text, "what is ***? what is ***?");
    let text = reported(error(Reply::refusal("403 Forbidden", &"ü".repeat(1 << 20))).await).1;
    assert_eq!(text, "ü".repeat(1000));
}

#[tokio::test]
async fn client_error_matches_go_when_server_is_missing() {
    let refused =
        super::kubernetes(&serde_json::json!({"kubernetes": {"k8s_api_root": "http://user:hidden@127.0.0.1:1"}}));
    let (code, text) = reported(refused.client().unwrap().namespace("shop", LONG).await.unwrap_err());
    let expected =
        "Get \"http://127.0.0.1:1/api/v1/namespaces/shop\": dial tcp 127.0.0.1:1: connect: connection refused";
    assert_eq!((code, text.as_str()), (999, expected));
    let unknown = super::kubernetes(&serde_json::json!({"kubernetes": {"k8s_api_root": "http://api.invalid:1"}}));
    let (code, text) = reported(unknown.client().unwrap().pod("shop", "pod1", LONG).await.unwrap_err());
    let beginning = "Get \"http://api.invalid:1/api/v1/namespaces/shop/pods/pod1\": ";
    // If the name server is slow, the lookup may take longer than the request's time limit.
    let is_one = text.starts_with(&format!("{beginning}dial tcp: lookup api.invalid: "))
        || text == format!("{beginning}context deadline exceeded");
    assert!(code == 11 && is_one, "{code} {text}");
}

#[tokio::test]
async fn client_ends_in_time_when_server_is_slow() {
    let slow = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}".as_bytes().to_vec();
    for reply in [Reply::Nothing, Reply::Drip(slow)] {
        let server = Server::saying(reply);
        let mut client = client(&server);
        let begun = Instant::now();
        let late = client.namespace("shop", Duration::from_millis(600)).await.unwrap_err();
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
        assert!(late.details().starts_with("there was no answer in 0.6 s; "), "{late}");
        let text = format!("Get \"{}/api/v1/namespaces/shop\": context deadline exceeded", server.url());
        assert_eq!(reported(late), (11, text));
    }
}

#[tokio::test]
async fn client_error_when_answer_is_garbage() {
    let truncated = format!("HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n{NAMESPACE}").into_bytes();
    let text = reported(error(Reply::Bytes(truncated)).await).1;
    assert!(text.ends_with(" was cut off, or has no end"), "{text}");
    let text = reported(error(Reply::ok(&format!("{{\"metadata\":\"{}", "x".repeat(10 << 20)))).await).1;
    assert!(text.ends_with(" was cut off, or has no end"), "{text}");
    for bytes in [&b"SSH-2.0-OpenSSH_9.2\r\n"[..], b"HTTP/1.1 999999 x\r\n\r\n", b"\0\0\0\0", b"HTTP/1.1 200 OK\r\nx"] {
        let text = reported(error(Reply::Bytes(bytes.to_vec())).await).1;
        assert!(text.contains(" broke: "), "{text}");
    }
    let hidden = r#"{"metadata":{"labels":{"a":["hidden"]}}}"#;
    for body in
        ["", "<html>", "[]", "null", "{}", hidden, &"[".repeat(1 << 20), "{\"metadata\":{\"labels\":{\"a\":\"\u{0}"]
    {
        let (code, text) = reported(error(Reply::ok(body)).await);
        assert!(code == 999 && text.ends_with(" is none of namespaces"), "{code} {text}");
    }
    let (code, text) = reported(client(&Server::saying(Reply::ok("hi"))).version(LONG).await.unwrap_err());
    assert!(code == 999 && text.ends_with(" is none of version"), "{text}");
}

#[tokio::test]
async fn client_refuses_names_that_are_none() {
    let server = Server::saying(Reply::ok(NAMESPACE));
    let mut client = client(&server);
    for name in ["", "../secrets", "a/b", "A", "node1\n", "a?b", "a%2fb"] {
        assert_eq!(reported(client.namespace(name, LONG).await.unwrap_err()).0, 999);
        assert_eq!(reported(client.pod("shop", name, LONG).await.unwrap_err()).0, 999);
        assert_eq!(reported(client.pod(name, "pod1", LONG).await.unwrap_err()).0, 999);
        assert_eq!(reported(client.node_pod_cidrs(name, LONG).await.unwrap_err()).0, 999);
    }
    assert_eq!(server.heads().len(), 0);
}

#[tokio::test]
async fn client_retries_when_api_asks_for_it() {
    let busy = |seconds: &str| {
        let body = r#"{"kind":"Status","message":"busy"}"#;
        Reply::Say("429 Too Many Requests".into(), format!("retry-after: {seconds}\r\n"), body.into())
    };
    let often = Server::start(move |number, _| if number < 3 { busy("0") } else { Reply::ok(NAMESPACE) });
    client(&often).namespace("shop", LONG).await.unwrap();
    assert_eq!((often.heads().len(), often.connections()), (4, 1));
    // A request is retried at most ten times, and not if the pause before the retry would exceed the request's time
    // limit.
    let always = Server::saying(busy("0"));
    assert_eq!(reported(client(&always).namespace("shop", LONG).await.unwrap_err()), (11, "busy".to_owned()));
    assert_eq!(always.heads().len(), 11);
    for seconds in ["30", "18446744073709551615", "99999999999999999999999", "-1", "soon", ""] {
        let server = Server::saying(busy(seconds));
        let begun = Instant::now();
        assert_eq!(reported(client(&server).namespace("shop", LONG).await.unwrap_err()).0, 11);
        assert!(begun.elapsed() < Duration::from_secs(3), "{seconds}");
        server.only_head();
    }
}
