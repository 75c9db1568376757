//! Runs a service thread for the test cases. The service thread forwards connections from a test case's network
//! namespace to an etcd outside of it, and serves the Kubernetes API.
//!
//! A socket stays in the network namespace of the thread that has created the socket. A test case creates a listening
//! socket in its own network namespace, and the service thread accepts the connections in the machine's namespace.

use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::sync::OnceLock;

use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::task::{AbortHandle, JoinSet};

/// Starts the service thread on the first call, which must run in a thread in the machine's original namespaces.
pub(crate) fn carrier() -> &'static Handle {
    static CARRIER: OnceLock<Handle> = OnceLock::new();
    CARRIER.get_or_init(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let handle = runtime.handle().clone();
        std::thread::spawn(move || runtime.block_on(std::future::pending::<()>()));
        handle
    })
}

/// A listening socket on which connections are served until this value is dropped.
#[derive(Debug)]
pub(crate) struct Served(AbortHandle);

impl Drop for Served {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Serves all connections to an address in the calling thread's network namespace.
pub(crate) fn serve<F>(address: SocketAddr, connection: impl Fn(TcpStream) -> F + Send + 'static) -> Served
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind(address).unwrap();
    listener.set_nonblocking(true).unwrap();
    let task = carrier().spawn(async move {
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        // When the accepting task is aborted, dropping the `JoinSet` also closes all accepted connections.
        let mut connections = JoinSet::new();
        loop {
            if let Ok((stream, _)) = listener.accept().await {
                connections.spawn(connection(stream));
                while connections.try_join_next().is_some() {}
            }
        }
    });
    Served(task.abort_handle())
}

/// Listens on `address` in the calling thread's network namespace, and forwards connections to `to` in the machine's
/// network namespace.
pub(crate) fn forward(address: SocketAddr, to: SocketAddr) -> Served {
    serve(address, move |mut stream| async move {
        if let Ok(mut beyond) = TcpStream::connect(to).await {
            let _ = beyond.set_nodelay(true);
            let _ = stream.set_nodelay(true);
            // If copying between the two streams fails, either end has closed the connection.
            let _ = tokio::io::copy_bidirectional(&mut stream, &mut beyond).await;
        }
    })
}
