//! Tests with a server that, like kine, supports only a few forms of transactions, each on one key.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::lab::Lab;
use crate::process::Call;

/// The server's errors for an unsupported transaction: the gRPC code, and the message as encoded in the HTTP header.
const REFUSALS: [(u32, &str); 2] = [
    (3, "etcdserver: unsupported operations in txn request"),
    // Older versions of kine repeat the whole request in the error message.
    (2, "unsupported transaction: success:<request_put:<value:\"hidden-document\" > >"),
];

/// Accepts every connection, and counts and rejects every transaction.
async fn serve(listener: tokio::net::TcpListener, code: u32, text: &'static str, asked: Arc<AtomicUsize>) {
    while let Ok((socket, _)) = listener.accept().await {
        let asked = Arc::clone(&asked);
        tokio::spawn(async move {
            let mut connection = h2::server::handshake(socket).await.unwrap();
            while let Some(Ok((request, mut respond))) = connection.accept().await {
                assert_eq!(request.uri().path(), "/etcdserverpb.KV/Txn", "nothing else is asked before");
                asked.fetch_add(1, Ordering::Relaxed);
                let head = http::Response::builder()
                    .header("content-type", "application/grpc")
                    .header("grpc-status", code)
                    .header("grpc-message", text);
                respond.send_response(head.body(()).unwrap(), true).unwrap();
            }
        });
    }
}

#[test]
fn one_key_server_is_recognized_at_once() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    for (code, text) in REFUSALS {
        let asked = Arc::new(AtomicUsize::new(0));
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        runtime.spawn(serve(listener, code, text, Arc::clone(&asked)));
        let lab = Lab::on_empty(Vec::new());
        let conf = lab.conf_at(std::slice::from_ref(&url));
        for (calls, verb) in ["ADD", "DEL"].into_iter().enumerate() {
            let outcome = Call::new(verb, "c1", &conf).run();
            let refusal = outcome.refusal();
            refusal.says(&[url.as_str(), "takes no transactions on several keys, as kine does not", "use a real etcd"]);
            assert_eq!(refusal.code, 999);
            assert!(!refusal.text.contains("it may have been carried out"), "{refusal:?}");
            assert!(!outcome.stderr.contains("hidden-document"), "{outcome:?}");
            assert_eq!(asked.load(Ordering::Relaxed), calls + 1, "it is not asked again");
        }
    }
}
