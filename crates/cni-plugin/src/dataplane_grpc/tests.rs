//! Tests of the data plane client against an HTTP/2 server whose answers are configurable.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use conformance::patient;
use http::{HeaderMap, Response};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};

use super::*;

const LONG: Duration = Duration::from_secs(60);

#[derive(Clone)]
enum Reply {
    Message(Vec<u8>),
    /// A gRPC status code and the status message.
    Status(&'static str, &'static str),
    /// The test server never answers.
    Nothing,
}

/// The calls that a test server received: the path, authority and message of each call.
type Calls = Arc<Mutex<Vec<(String, String, Vec<u8>)>>>;

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, reply: Reply, calls: Calls) {
    let Ok(mut connection) = h2::server::handshake(stream).await else { return };
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        let (reply, calls) = (reply.clone(), Arc::clone(&calls));
        // Answer each request in a separate task, because the HTTP/2 connection must be polled at the same time.
        tokio::spawn(async move {
            let (head, mut body) = request.into_parts();
            let mut bytes = Vec::new();
            while let Some(Ok(piece)) = body.data().await {
                bytes.extend_from_slice(&piece);
            }
            assert_eq!(head.headers["content-type"], "application/grpc");
            let length = u32::from_be_bytes(bytes[1..5].try_into().unwrap());
            assert_eq!((bytes[0], length as usize), (0, bytes.len() - 5));
            let call = (head.uri.path().to_owned(), head.uri.authority().unwrap().to_string(), bytes.split_off(5));
            calls.lock().unwrap_or_else(PoisonError::into_inner).push(call);
            let answer = Response::builder().header("content-type", "application/grpc").body(()).unwrap();
            let (message, status, text) = match reply {
                Reply::Message(message) => (Some(message), "0", ""),
                Reply::Status(status, text) => (None, status, text),
                Reply::Nothing => return tokio::time::sleep(LONG).await,
            };
            let mut stream = respond.send_response(answer, false).unwrap();
            if let Some(message) = message {
                let length = u32::try_from(message.len()).unwrap().to_be_bytes();
                stream.send_data(Bytes::from([&[0][..], &length, &message].concat()), false).unwrap();
            }
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", status.parse().unwrap());
            trailers.insert("grpc-message", text.parse().unwrap());
            stream.send_trailers(trailers).unwrap();
        });
    }
}

struct Server {
    folder: tempfile::TempDir,
    calls: Calls,
}

impl Server {
    fn start(reply: Reply) -> Self {
        let (folder, calls) = (tempfile::tempdir().unwrap(), Calls::default());
        let listener = UnixListener::bind(folder.path().join("cni.sock")).unwrap();
        let seen = Arc::clone(&calls);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, reply.clone(), Arc::clone(&seen)));
            }
        });
        Self { folder, calls }
    }

    fn replying(reply: &impl Message) -> Self {
        Self::start(Reply::Message(reply.encode_to_vec()))
    }

    fn target(&self) -> String {
        format!("unix://{}/cni.sock", self.folder.path().display())
    }

    fn calls(&self) -> Vec<(String, String, Vec<u8>)> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn choose(options: &str) -> Result<Dataplane> {
    Dataplane::choose(Some(&GoJson::parse(options.as_bytes()).unwrap()))
}

fn dataplane(target: &str) -> GrpcDataplane {
    let options = format!(r#"{{"type":"grpc","socket":{},"speed":9,"colour":"blue"}}"#, quoted(target));
    match choose(&options).unwrap() {
        Dataplane::Grpc(dataplane) => dataplane,
        Dataplane::Linux => panic!("{options}"),
    }
}

fn made() -> AddReply {
    AddReply {
        successful: true,
        error_message: String::new(),
        host_interface_name: "tap7".into(),
        container_mac: "AA:bb:cc:dd:ee:01".into(),
    }
}

fn request() -> AddRequest {
    AddRequest {
        interface_name: "eth0".into(),
        settings: Some(ContainerSettings { allow_ip_forwarding: false, mtu: 1440 }),
        workload: Some(WorkloadIds { pod: "pod1".into(), ..WorkloadIds::default() }),
        ..AddRequest::default()
    }
}

async fn refused(target: &str, left: Duration) -> String {
    let added = dataplane(target).add(request(), left).await.unwrap_err();
    let deleted = dataplane(target).del("eth0", "/run/netns/a", left).await.unwrap_err();
    assert_eq!((added.code().number(), deleted.code().number()), (999, 999));
    assert_eq!(added.message(), deleted.message());
    added.message().to_owned()
}

#[test]
fn data_plane_is_chosen_by_configuration() {
    assert_eq!(Dataplane::choose(None).unwrap(), Dataplane::Linux);
    for options in ["{}", "null", r#"{"socket":"x","Type":"grpc"}"#] {
        assert_eq!(choose(options).unwrap(), Dataplane::Linux, "{options}");
    }
    for (options, text) in [
        (r#"{"type":"bogus"}"#, "invalid dataplane type: bogus"),
        (r#"{"type":""}"#, "invalid dataplane type: "),
        (r#"{"type":5}"#, "invalid dataplane type: 5"),
        (r#"{"type":"grpc"}"#, "GRPC dataplane socket not configured"),
        (r#"{"type":"grpc","socket":5}"#, "GRPC dataplane socket not configured"),
    ] {
        let error = choose(options).unwrap_err();
        assert_eq!((error.code().number(), error.message()), (999, text), "{options}");
    }
}

#[tokio::test]
async fn grpc_makes_and_removes_interfaces() {
    let server = Server::replying(&made());
    let dataplane = dataplane(&server.target());
    let answer = dataplane.add(request(), LONG).await.unwrap();
    assert_eq!((answer.host_interface.as_str(), answer.mac.text.as_str()), ("tap7", "aa:bb:cc:dd:ee:01"));
    dataplane.del("eth0", "/run/netns/a", LONG).await.unwrap();
    let calls = server.calls();
    assert_eq!([&calls[0].0, &calls[1].0], ["/cni.CniDataplane/Add", "/cni.CniDataplane/Del"]);
    assert_eq!(calls[0].1, "localhost");
    let options = [("colour", "blue"), ("socket", &server.target()), ("type", "grpc")];
    let options: BTreeMap<_, _> = options.map(|(name, text)| (name.to_owned(), text.to_owned())).into();
    let expected = AddRequest { dataplane_options: options.clone(), ..request() };
    assert_eq!(AddRequest::decode(calls[0].2.as_slice()).unwrap(), expected);
    let del = DelRequest::decode(calls[1].2.as_slice()).unwrap();
    assert_eq!((del.interface_name.as_str(), del.netns.as_str()), ("eth0", "/run/netns/a"));
    assert_eq!(del.dataplane_options, options);
}

#[tokio::test]
async fn grpc_server_may_be_anywhere() {
    let server = Server::replying(&made());
    let path = server.folder.path().join("cni.sock");
    dataplane(&format!("unix:{}", path.display())).del("eth0", "", LONG).await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, calls) = (listener.local_addr().unwrap(), Calls::default());
    let seen = Arc::clone(&calls);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, Reply::Message(made().encode_to_vec()), Arc::clone(&seen)));
        }
    });
    for scheme in ["", "dns:", "dns:///", "passthrough:///"] {
        dataplane(&format!("{scheme}{address}")).del("eth0", "", LONG).await.unwrap();
    }
    let calls = calls.lock().unwrap_or_else(PoisonError::into_inner).clone();
    assert_eq!(calls.len(), 4);
    assert!(calls.iter().all(|(_, authority, _)| *authority == address.to_string()), "{calls:?}");
}

#[tokio::test]
async fn grpc_refusal_is_passed_on() {
    let no = DelReply { successful: false, error_message: "no more taps".into() };
    let server = Server::replying(&no);
    assert_eq!(refused(&server.target(), LONG).await, "grpc dataplane error: no more taps");
    let server = Server::replying(&AddReply { container_mac: "x".into(), ..made() });
    let error = dataplane(&server.target()).add(request(), LONG).await.unwrap_err();
    assert_eq!(error.message(), "address x: invalid MAC address");
}

#[tokio::test]
async fn grpc_error_matches_go_when_server_is_missing() {
    let beginning =
        "rpc error: code = Unavailable desc = connection error: desc = \"transport: Error while dialing: dial ";
    for (target, reason) in [
        ("unix:///nowhere/cni.sock", "unix /nowhere/cni.sock: connect: no such file or directory\""),
        ("127.0.0.1:1", "tcp 127.0.0.1:1: connect: connection refused\""),
        ("/nowhere/cni.sock", "tcp /nowhere/cni.sock: connect: "),
        ("", "tcp : connect: "),
    ] {
        let text = refused(target, LONG).await;
        assert!(text.starts_with(&format!("{beginning}{reason}")), "{text}");
    }
}

#[tokio::test]
async fn grpc_error_matches_go_when_call_ends_otherwise() {
    for (reply, text) in [
        (Reply::Status("12", "unknown service"), "rpc error: code = Unimplemented desc = unknown service"),
        (Reply::Status("1", "stopped"), "rpc error: code = Canceled desc = stopped"),
        (Reply::Status("7", ""), "rpc error: code = PermissionDenied desc = "),
    ] {
        assert_eq!(refused(&Server::start(reply).target(), LONG).await, text);
    }
    for message in [vec![0xff; 40], vec![8]] {
        let server = Server::start(Reply::Message(message));
        let error = dataplane(&server.target()).add(request(), LONG).await.unwrap_err();
        assert!(error.message().starts_with("rpc error: code = Internal desc = "), "{error}");
    }
    let silent = Server::start(Reply::Nothing);
    let begun = Instant::now();
    let expected = "rpc error: code = DeadlineExceeded desc = context deadline exceeded";
    assert_eq!(refused(&silent.target(), Duration::from_millis(300)).await, expected);
    assert!(begun.elapsed() < patient(Duration::from_secs(3)), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn grpc_error_when_answer_is_not_grpc() {
    for bytes in [&b""[..], b"HTTP/1.1 400 Bad Request\r\n\r\n", &[0xff; 100]] {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("cni.sock")).unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.write_all(bytes).await;
            }
        });
        let text = refused(&format!("unix://{}/cni.sock", folder.path().display()), LONG).await;
        assert!(text.starts_with("rpc error: code = "), "{text}");
    }
}

/// Encodes a length-delimited protobuf field: tag, length, content.
fn bytes(number: u8, content: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2, u8::try_from(content.len()).unwrap()], content].concat()
}

fn text(number: u8, text: &str) -> Vec<u8> {
    bytes(number, text.as_bytes())
}

/// Encodes a protobuf varint field with a value below 128.
fn number(number: u8, value: u8) -> Vec<u8> {
    vec![number << 3, value]
}

fn pair(name: &str, value: &str) -> Vec<u8> {
    [text(1, name), text(2, value)].concat()
}

fn map(name: &str, value: &str) -> BTreeMap<String, String> {
    BTreeMap::from([(name.to_owned(), value.to_owned())])
}

#[test]
fn grpc_messages_have_go_field_numbers() {
    let port =
        GrpcPort { name: "dns".into(), protocol: "UDP".into(), port: 53, host_port: 54, host_ip: "10.1.2.3".into() };
    let workload = WorkloadIds {
        name: "n".into(),
        namespace: "ns".into(),
        labels: map("l", "1"),
        annotations: map("a", "2"),
        endpoint: "eth0".into(),
        node: "node1".into(),
        orchestrator: "k8s".into(),
        pod: "pod1".into(),
        ports: vec![port],
    };
    let request = AddRequest {
        interface_name: "eth0".into(),
        netns: "/run/netns/a".into(),
        desired_host_interface_name: "cali1".into(),
        settings: Some(ContainerSettings { allow_ip_forwarding: true, mtu: 68 }),
        container_ips: vec![
            IpConfig::new("10.65.0.1/26".parse().unwrap(), None),
            IpConfig::new("fd00::1/122".parse().unwrap(), Some("fd00::2".parse().unwrap())),
        ],
        container_routes: vec!["0.0.0.0/0".into(), "::/0".into()],
        workload: Some(workload),
        dataplane_options: map("type", "grpc"),
    };
    let port = [text(1, "dns"), text(2, "UDP"), number(3, 53), number(4, 54), text(5, "10.1.2.3")].concat();
    let workload = [
        text(1, "n"),
        text(2, "ns"),
        bytes(3, &pair("l", "1")),
        bytes(4, &pair("a", "2")),
        text(5, "eth0"),
        text(6, "node1"),
        text(7, "k8s"),
        text(8, "pod1"),
        bytes(9, &port),
    ]
    .concat();
    let expected = [
        text(1, "eth0"),
        text(2, "/run/netns/a"),
        text(3, "cali1"),
        bytes(4, &[number(1, 1), number(2, 68)].concat()),
        bytes(5, &[text(1, "10.65.0.1/26"), text(2, "<nil>")].concat()),
        bytes(5, &[text(1, "fd00::1/122"), text(2, "fd00::2")].concat()),
        text(6, "0.0.0.0/0"),
        text(6, "::/0"),
        bytes(7, &workload),
        bytes(8, &pair("type", "grpc")),
    ]
    .concat();
    assert_eq!(request.encode_to_vec(), expected);
    let request = DelRequest { interface_name: "eth0".into(), netns: "/a".into(), dataplane_options: map("x", "y") };
    let expected = [text(1, "eth0"), text(2, "/a"), bytes(3, &pair("x", "y"))].concat();
    assert_eq!(request.encode_to_vec(), expected);
    let reply = [number(1, 1), text(2, "no"), text(3, "cali1"), text(4, "aa:bb")].concat();
    let expected = AddReply {
        successful: true,
        error_message: "no".into(),
        host_interface_name: "cali1".into(),
        container_mac: "aa:bb".into(),
    };
    assert_eq!(AddReply::decode(reply.as_slice()).unwrap(), expected);
    let reply = [number(1, 0), text(2, "no")].concat();
    let expected = DelReply { successful: false, error_message: "no".into() };
    assert_eq!(DelReply::decode(reply.as_slice()).unwrap(), expected);
}
