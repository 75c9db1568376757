//! Simulates a bad network with a TCP proxy between a store's client and its server.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener as StdListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// Maximum number of bytes that the proxy forwards in one chunk.
const CHUNK_BYTES: usize = 16 << 10;

/// The simulated condition of the network link between client and server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkCondition {
    /// The proxy forwards all bytes.
    Up,
    /// The proxy forwards all bytes, and delays each chunk by this duration.
    Slow(Duration),
    /// The proxy closes new connections immediately, and forwards nothing on the existing ones.
    Refusing,
    /// The proxy accepts connections, but forwards no bytes until its `LinkCondition` is changed.
    Silent,
    /// The proxy drops the bytes that the client sends.
    LosesRequests,
    /// The proxy drops the bytes that the server sends.
    LosesReplies,
}

/// A TCP proxy with its own loopback address. Dropping the proxy ends all its connections.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    control: Arc<Control>,
    task: AbortHandle,
}

#[derive(Debug)]
struct Control {
    server: SocketAddr,
    link: watch::Sender<LinkCondition>,
    /// How often the proxy has cut the link so far. Each cut of the link ends all connections that are open at that
    /// moment.
    cuts: watch::Sender<u64>,
    /// The number of bytes that the proxy has dropped.
    lost: watch::Sender<usize>,
    /// The number of bytes from the server that the proxy still forwards before a planned cut.
    until_cut: Mutex<Option<usize>>,
}

impl Proxy {
    /// Starts a proxy in front of this server.
    ///
    /// # Errors
    /// An error if no TCP port is free.
    pub fn to(server: SocketAddr) -> io::Result<Self> {
        let listener = StdListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        let address = listener.local_addr()?;
        let control = Arc::new(Control {
            server,
            link: watch::Sender::new(LinkCondition::Up),
            cuts: watch::Sender::new(0),
            lost: watch::Sender::new(0),
            until_cut: Mutex::new(None),
        });
        let task = tokio::spawn(listen(listener, control.clone())).abort_handle();
        Ok(Self { address, control, task })
    }

    /// The proxy's address, to which clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes the condition of the proxied network link, also for connections that are already open.
    pub fn set(&self, link: LinkCondition) {
        self.control.link.send_replace(link);
    }

    /// Ends all connections through the proxy. The condition of the link decides whether new connections are accepted.
    pub fn cut(&self) {
        self.control.cut();
    }

    /// Cuts all connections after the server has sent this number of further bytes, even in the middle of an answer.
    pub fn cut_after(&self, bytes: usize) {
        *self.control.until_cut.lock().unwrap_or_else(PoisonError::into_inner) = Some(bytes);
    }

    /// Ends all connections through the proxy, then sets the link to [`LinkCondition::Up`].
    pub fn heal(&self) {
        // Before the proxy cuts its connections, set its link to `Refusing`, so that open connections forward nothing
        // and no new connection is accepted.
        self.set(LinkCondition::Refusing);
        self.cut();
        self.set(LinkCondition::Up);
    }

    /// Waits until the proxy has dropped at least one byte.
    pub async fn something_got_lost(&self) {
        // The `Proxy` owns the sender of `lost`, so receiving from this channel cannot fail.
        let _ = self.control.lost.subscribe().wait_for(|lost| *lost > 0).await;
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
        self.cut();
    }
}

impl Control {
    fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Returns how many of the next `bytes` bytes from the server the proxy forwards, and whether it cuts the
    /// connection after them.
    fn passing(&self, bytes: usize) -> (usize, bool) {
        let mut until_cut = self.until_cut.lock().unwrap_or_else(PoisonError::into_inner);
        match *until_cut {
            Some(left) if left <= bytes => {
                *until_cut = None;
                (left, true)
            }
            Some(left) => {
                *until_cut = Some(left - bytes);
                (bytes, false)
            }
            None => (bytes, false),
        }
    }
}

async fn listen(listener: TcpListener, control: Arc<Control>) {
    while let Ok((client, _)) = listener.accept().await {
        if *control.link.borrow() != LinkCondition::Refusing {
            let cuts = control.cuts.subscribe();
            tokio::spawn(carry(client, control.clone(), cuts));
        }
    }
}

/// Forwards bytes in both directions until either side closes the connection or a cut happens.
async fn carry(mut client: TcpStream, control: Arc<Control>, mut cuts: watch::Receiver<u64>) {
    let both_ways = async {
        let mut server = TcpStream::connect(control.server).await?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
        tokio::select! {
            end = pump(from_client, to_server, Direction::Request, &control) => end,
            end = pump(from_server, to_client, Direction::Reply, &control) => end,
        }
    };
    // Errors of the transfer are ignored: the proxy closes both connections, and neither client nor server would see a
    // further error.
    tokio::select! {
        biased;
        _ = cuts.changed() => {}
        _ = both_ways => {}
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Request,
    Reply,
}

async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    way: Direction,
    control: &Control,
) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut links = control.link.subscribe();
    loop {
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        let link = *links
            .wait_for(|link| !matches!(link, LinkCondition::Silent | LinkCondition::Refusing))
            .await
            .map_err(io::Error::other)?;
        match (link, way) {
            (LinkCondition::LosesRequests, Direction::Request) | (LinkCondition::LosesReplies, Direction::Reply) => {
                control.lost.send_modify(|lost| *lost += count);
                continue;
            }
            (LinkCondition::Slow(delay), _) => tokio::time::sleep(delay).await,
            _ => {}
        }
        let (count, cut) = match way {
            Direction::Request => (count, false),
            Direction::Reply => control.passing(count),
        };
        to.write_all(buffer.get(..count).unwrap_or_default()).await?;
        if cut {
            control.cut();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(10);

    /// Starts an echo server, a proxy in front of it, and a connection through the proxy.
    async fn echo() -> (Proxy, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let proxy = Proxy::to(listener.local_addr().unwrap()).unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut from, mut to) = stream.split();
                    tokio::io::copy(&mut from, &mut to).await
                });
            }
        });
        let stream = TcpStream::connect(proxy.address()).await.unwrap();
        (proxy, stream)
    }

    /// The number of bytes of `sent` that the server echoes before the connection closes.
    async fn sent_back(stream: &mut TcpStream, sent: &[u8]) -> usize {
        stream.write_all(sent).await.unwrap();
        let (mut buffer, mut count) = (vec![0; sent.len()], 0);
        while count < sent.len() {
            match tokio::time::timeout(LONG, stream.read(&mut buffer[count..])).await.unwrap() {
                Ok(0) | Err(_) => return count,
                Ok(more) => count += more,
            }
        }
        count
    }

    #[tokio::test]
    async fn proxy_carries_and_cuts() {
        let (proxy, mut stream) = echo().await;
        assert_eq!(sent_back(&mut stream, &[7; 100_000]).await, 100_000);
        proxy.cut_after(40);
        assert_eq!(sent_back(&mut stream, &[7; 100]).await, 40);
        let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
        assert_eq!(sent_back(&mut stream, &[7]).await, 1);
        proxy.cut();
        assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
    }

    #[tokio::test]
    async fn proxy_refuses_and_is_silent() {
        let (proxy, mut stream) = echo().await;
        assert_eq!(sent_back(&mut stream, &[7]).await, 1);
        proxy.set(LinkCondition::Silent);
        stream.write_all(&[7]).await.unwrap();
        assert!(tokio::time::timeout(Duration::from_millis(100), stream.read(&mut [0])).await.is_err());
        proxy.set(LinkCondition::Slow(Duration::from_millis(5)));
        assert_eq!(tokio::time::timeout(LONG, stream.read(&mut [0])).await.unwrap().unwrap(), 1);
        proxy.set(LinkCondition::Refusing);
        let mut refused = TcpStream::connect(proxy.address()).await.unwrap();
        assert_eq!(refused.read(&mut [0]).await.unwrap_or(0), 0);
    }

    #[tokio::test]
    async fn proxy_loses_what_it_is_told_to_lose() {
        for link in [LinkCondition::LosesRequests, LinkCondition::LosesReplies] {
            let (proxy, mut stream) = echo().await;
            assert_eq!(sent_back(&mut stream, &[7]).await, 1);
            proxy.set(link);
            stream.write_all(&[7]).await.unwrap();
            tokio::time::timeout(LONG, proxy.something_got_lost()).await.unwrap();
            proxy.heal();
            assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
            let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
            assert_eq!(sent_back(&mut stream, &[7]).await, 1);
        }
    }
}
