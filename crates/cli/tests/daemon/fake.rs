//! Runs foreign listeners on a daemon's socket.

use std::fs;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use wire::{FileId, Frame, FrameKind, Hello, StoreIdentity};

/// A listener that passes each connection to a function, and that stops when the [`Fake`] is dropped.
pub(crate) struct Fake {
    socket: PathBuf,
    over: Arc<AtomicBool>,
    met: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Fake {
    pub(crate) fn listen(socket: &Path, serve: impl Fn(UnixStream) + Send + 'static) -> Self {
        fs::create_dir_all(socket.parent().unwrap()).unwrap();
        let _ = fs::remove_file(socket);
        let listener = UnixListener::bind(socket).unwrap();
        let (over, met) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (is_over, count) = (Arc::clone(&over), Arc::clone(&met));
        let thread = thread::spawn(move || {
            for stream in listener.incoming() {
                if is_over.load(Ordering::SeqCst) {
                    return;
                }
                count.fetch_add(1, Ordering::SeqCst);
                serve(stream.unwrap());
            }
        });
        Self { socket: socket.to_owned(), over, met, thread: Some(thread) }
    }

    /// Returns the number of clients that have connected to the listener.
    pub(crate) fn met(&self) -> usize {
        self.met.load(Ordering::SeqCst)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        let _ = UnixStream::connect(&self.socket);
        let _ = self.thread.take().unwrap().join();
        let _ = fs::remove_file(&self.socket);
    }
}

/// Returns a greeting of the current frame version for the store in a folder.
pub(crate) fn hello(folder: &Path) -> Hello {
    let queue = FileId::at(&folder.join("queue")).unwrap();
    Hello::new(StoreIdentity::Embedded { id: "any".to_owned(), queue })
}

/// Sends a frame to a client, which may already have disconnected.
pub(crate) fn send(stream: &mut UnixStream, frame: &Frame) {
    let _ = stream.write_all(&frame.to_bytes());
}

pub(crate) fn greet(stream: &mut UnixStream, hello: &Hello) {
    send(stream, &Frame::new(FrameKind::Hello, hello).unwrap());
}
