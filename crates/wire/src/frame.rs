//! Encodes and decodes frames (a version, a kind, a length and a body), and defines [`Hello`], the body of the daemon's
//! first frame.
//!
//! ```text
//! byte 0     the version of the frame format, see FRAME_VERSION
//! byte 1     the kind of the frame, a letter
//! bytes 2-5  the length of the body in bytes, little endian
//! then       the body: a bincode encoding of the type that belongs to the kind
//! ```

use std::fs::Metadata;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use bincode::config::{Configuration, Limit, LittleEndian, Varint};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt};

/// The version of the frame format. A client and a daemon with different versions do not exchange requests.
pub const FRAME_VERSION: u8 = 4;
/// Maximum size of a request's body, in bytes. A request to the store has at most 1.5 MiB, and the list of attachments
/// in a request for the CNI verb GC is shorter.
pub const MAX_REQUEST_BODY_BYTES: usize = 4 << 20;
/// Maximum size of an answer's body, in bytes. A store does not limit the size of its answers.
pub const MAX_ANSWER_BODY_BYTES: usize = 1 << 30;

const HEADER_BYTES: usize = 6;

const BINCODE_CONFIG: Configuration<LittleEndian, Varint, Limit<MAX_ANSWER_BODY_BYTES>> =
    bincode::config::standard().with_limit::<MAX_ANSWER_BODY_BYTES>();

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    /// The daemon's first frame on a connection: a [`Hello`].
    Hello = b'h',
    /// The daemon's confirmation, with an empty body, that it has received a request.
    Taken = b't',
    /// A [`StallReport`] that the daemon sends every second while a CNI verb is queued or in progress.
    Alive = b'l',
    /// A plugin's request to carry out a CNI verb.
    Verb = b'v',
    /// A request to the store: a [`keys::TimedRequest`](crate::keys::TimedRequest).
    Keys = b'k',
    /// The client's announcement that it is about to wait for the store lock. A `Yield` frame has an empty body, and
    /// the daemon does not answer it.
    Yield = b'y',
    /// The daemon's answer to a request, or one item of a watch that a client has requested.
    Answer = b'a',
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        let kinds = [Self::Hello, Self::Taken, Self::Alive, Self::Verb, Self::Keys, Self::Yield, Self::Answer];
        kinds.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// The daemon's progress report while a CNI verb waits: how long the daemon's store has made no progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StallReport {
    /// Time since the store last finished an operation, but at most the time since the request arrived. `stalled_for`
    /// is zero while another process has the store open.
    pub stalled_for: Duration,
}

/// A frame that was received or will be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The kind of the frame, which decides the type of the body.
    pub kind: FrameKind,
    body: Vec<u8>,
}

impl Frame {
    /// Creates a frame of this kind with an encoded body.
    ///
    /// # Errors
    /// `InvalidInput` if the body is longer than [`MAX_ANSWER_BODY_BYTES`], or cannot be encoded.
    pub fn new(kind: FrameKind, body: &impl Serialize) -> io::Result<Self> {
        Ok(Self { kind, body: encode(body)? })
    }

    /// Creates a frame without a body.
    pub fn empty(kind: FrameKind) -> Self {
        Self { kind, body: Vec::new() }
    }

    /// Returns the frame's bytes as they are sent.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.body.len());
        bytes.extend([FRAME_VERSION, self.kind as u8]);
        // Converting the body's length to `u32` cannot fail, because no body is longer than MAX_ANSWER_BODY_BYTES.
        bytes.extend(u32::try_from(self.body.len()).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend(&self.body);
        bytes
    }

    /// Decodes the body of the frame as a `T`.
    ///
    /// # Errors
    /// `InvalidData` if the body does not encode a `T`.
    pub fn decode<T: DeserializeOwned>(&self) -> io::Result<T> {
        decode(&self.body)
    }

    /// Reads a frame whose body has at most `limit` bytes. Returns `None` at the end of the stream.
    ///
    /// # Errors
    /// `InvalidData` if the bytes are not a frame; `UnexpectedEof` if the stream ends within a frame; any I/O error of
    /// the stream.
    pub async fn read(stream: &mut (impl AsyncRead + Unpin), limit: usize) -> io::Result<Option<Self>> {
        let mut header = [0; HEADER_BYTES];
        if stream.read(&mut header[..1]).await? == 0 {
            return Ok(None);
        }
        stream.read_exact(&mut header[1..]).await?;
        let (kind, length) = parse(header, limit)?;
        let mut body = Vec::new();
        // The buffer grows with the received bytes, because the announced length may be wrong.
        stream.take(length as u64).read_to_end(&mut body).await?;
        Self::from_body(kind, body, length).map(Some)
    }

    /// Parses bytes that are exactly one frame.
    ///
    /// # Errors
    /// Any error of [`read`](Self::read); `InvalidData` for bytes after the frame.
    pub fn read_from(mut bytes: &[u8]) -> io::Result<Self> {
        let frame = Self::read_blocking(&mut bytes, MAX_ANSWER_BODY_BYTES)?;
        if bytes.is_empty() { Ok(frame) } else { Err(malformed("bytes behind a frame")) }
    }

    /// Reads a frame like [`read`](Self::read), but from a blocking stream, whose end is an error.
    pub(crate) fn read_blocking(stream: &mut impl Read, limit: usize) -> io::Result<Self> {
        let mut header = [0; HEADER_BYTES];
        stream.read_exact(&mut header)?;
        let (kind, length) = parse(header, limit)?;
        let mut body = Vec::new();
        stream.take(length as u64).read_to_end(&mut body)?;
        Self::from_body(kind, body, length)
    }

    fn from_body(kind: FrameKind, body: Vec<u8>, length: usize) -> io::Result<Self> {
        if body.len() < length { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(Self { kind, body }) }
    }

    /// Returns this frame if it is of the expected kind.
    ///
    /// # Errors
    /// `InvalidData` if the frame is not of the expected kind.
    pub fn expect(self, kind: FrameKind) -> io::Result<Self> {
        match self.kind == kind {
            true => Ok(self),
            false => Err(malformed(format!("a frame {:?} in place of {kind:?}", self.kind))),
        }
    }
}

/// Encodes a value. The encoding depends on the order of the fields and variants of the value's type, so reordering
/// them breaks compatibility.
///
/// # Errors
/// `InvalidInput` if the encoding is longer than [`MAX_ANSWER_BODY_BYTES`], or the value cannot be encoded.
pub fn encode(what: &impl Serialize) -> io::Result<Vec<u8>> {
    let bytes = bincode::serde::encode_to_vec(what, BINCODE_CONFIG);
    let bytes = bytes.map_err(|error| io::Error::new(ErrorKind::InvalidInput, error))?;
    match bytes.len() <= MAX_ANSWER_BODY_BYTES {
        true => Ok(bytes),
        false => Err(io::Error::new(ErrorKind::InvalidInput, format!("{} bytes are too many", bytes.len()))),
    }
}

/// Decodes a value from bytes that contain exactly one encoded value.
///
/// # Errors
/// `InvalidData` if the bytes do not encode a `T`.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    match bincode::serde::decode_from_slice(bytes, BINCODE_CONFIG) {
        Ok((what, read)) if read == bytes.len() => Ok(what),
        Ok(_) => Err(malformed("bytes behind the end of a value")),
        Err(error) => Err(malformed(error.to_string())),
    }
}

fn parse(header: [u8; HEADER_BYTES], limit: usize) -> io::Result<(FrameKind, usize)> {
    let [version, kind, length @ ..] = header;
    if version != FRAME_VERSION {
        return Err(malformed(format!("frames of version {version}, and this program has version {FRAME_VERSION}")));
    }
    let kind = FrameKind::from_byte(kind).ok_or_else(|| malformed(format!("a frame of the unknown kind {kind}")))?;
    let length = u32::from_le_bytes(length) as usize;
    if length > limit {
        return Err(malformed(format!("a frame of {length} bytes; the limit is {limit}")));
    }
    Ok((kind, length))
}

/// Returns the error for malformed bytes from a connection.
pub fn malformed(what: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what.into())
}

/// The identity of a file: the numbers by which the kernel distinguishes files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    /// The number of the device that contains the file.
    pub device: u64,
    /// The number of the file's inode.
    pub inode: u64,
}

impl FileId {
    /// Returns the identity of the file with this metadata.
    pub fn of(metadata: &Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }

    /// Returns the identity of the file at a path, or `None` if the file's metadata cannot be read.
    pub fn at(path: &Path) -> Option<Self> {
        path.metadata().ok().as_ref().map(Self::of)
    }
}

/// The identity of the store that a daemon serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreIdentity {
    /// There is no store at the daemon's location.
    Nothing,
    /// An embedded store.
    Embedded {
        /// The id that the store was given when it was created.
        id: String,
        /// The identity of the file `queue` in the store's folder. If a client finds a different queue file in its own
        /// store's folder, the daemon serves another store.
        queue: FileId,
    },
    /// A cluster's store.
    Cluster {
        /// The way to log in to the cluster, without secrets: endpoints, user, the client's certificate. The daemon
        /// serves only clients whose login equals the daemon's.
        access: String,
    },
}

/// The daemon's greeting, the first frame of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The version of the daemon's program. The encoding of request bodies depends on the program's version.
    pub program: String,
    /// The process id of the daemon in the daemon's own PID namespace.
    pub process: u32,
    /// The identity of the daemon's store.
    pub store: StoreIdentity,
}

impl Hello {
    /// Creates the greeting of this process, with its version and process id.
    pub fn new(store: StoreIdentity) -> Self {
        Self { program: env!("CARGO_PKG_VERSION").to_owned(), process: std::process::id(), store }
    }

    /// Returns whether the daemon has the same version as this program.
    pub fn is_same_version(&self) -> bool {
        self.program == env!("CARGO_PKG_VERSION")
    }

    /// Returns whether the daemon serves the embedded store in this folder.
    pub fn has_store_in(&self, folder: &Path) -> bool {
        match &self.store {
            StoreIdentity::Embedded { queue, .. } => FileId::at(&folder.join("queue")) == Some(*queue),
            StoreIdentity::Nothing | StoreIdentity::Cluster { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(mut bytes: &[u8], limit: usize) -> io::Result<Option<Frame>> {
        Frame::read(&mut bytes, limit).await
    }

    #[tokio::test]
    async fn frame_is_read_as_written() {
        let frame = Frame::new(FrameKind::Verb, &("text", 5_u64, vec![1_u8, 2])).unwrap();
        let bytes = frame.to_bytes();
        assert_eq!(read(&bytes, 100).await.unwrap(), Some(frame.clone()));
        assert_eq!(Frame::read_blocking(&mut &bytes[..], 100).unwrap(), frame);
        assert_eq!(frame.decode::<(String, u64, Vec<u8>)>().unwrap(), ("text".to_owned(), 5, vec![1, 2]));
        assert_eq!(read(&[], 100).await.unwrap(), None);
    }

    #[tokio::test]
    async fn frame_is_refused_when_malformed() {
        let good = Frame::new(FrameKind::Keys, &7_u64).unwrap().to_bytes();
        for length in 1..good.len() {
            assert_eq!(read(&good[..length], 100).await.unwrap_err().kind(), ErrorKind::UnexpectedEof, "{length}");
        }
        let changed = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes
        };
        for bad in [changed(0, FRAME_VERSION + 1), changed(1, b'?'), changed(5, 0xff), b"GET / HTTP/1.1\r\n".to_vec()] {
            assert_eq!(read(&bad, 100).await.unwrap_err().kind(), ErrorKind::InvalidData);
        }
        assert!(read(&good, 0).await.is_err(), "too long");
    }

    #[test]
    fn frame_body_is_refused_when_of_another_type() {
        assert!(Frame::new(FrameKind::Verb, &1_u8).unwrap().decode::<String>().is_err());
        assert!(Frame::new(FrameKind::Verb, &(1_u8, 2_u8)).unwrap().decode::<u8>().is_err(), "bytes are left");
        // Decoding an impossible length must fail before it allocates memory.
        assert!(Frame::new(FrameKind::Verb, &u64::MAX).unwrap().decode::<Vec<u8>>().is_err());
    }

    #[test]
    fn store_is_known_by_its_queue() {
        let folder = tempfile::tempdir().unwrap();
        let queue = folder.path().join("queue");
        std::fs::write(&queue, "").unwrap();
        let hello = Hello::new(StoreIdentity::Embedded { id: "x".to_owned(), queue: FileId::at(&queue).unwrap() });
        assert!(hello.has_store_in(folder.path()) && hello.is_same_version());
        let other = tempfile::tempdir().unwrap();
        assert!(!hello.has_store_in(other.path()));
        std::fs::write(other.path().join("queue"), "").unwrap();
        assert!(!hello.has_store_in(other.path()));
        assert!(!Hello::new(StoreIdentity::Nothing).has_store_in(other.path()));
    }
}
