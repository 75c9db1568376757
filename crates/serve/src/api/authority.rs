//! Requests whose `:authority` is none: Debian's etcdctl 3.4 sends the scheme with an endpoint `http://HOST:PORT`, and programs in Go the
//! path of a unix socket.
//!
//! The HTTP/2 library refuses such a request before anybody can correct it (hyperium/h2#487), and nothing here reads the authority. So
//! the bytes of a client pass through here first, and the literal that names an authority is replaced by a valid one. Header
//! compression (HPACK, RFC 7541) keeps literals in a table for later requests, which counts entries from the newest and removes the
//! oldest when it is full. The new literal is shorter than any other: the table has each entry that the client knows.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The length of the bytes with which a client's connection begins.
const PREFACE_BYTES: usize = 24;
/// The length of a frame's header.
const FRAME_HEADER_BYTES: usize = 9;
/// The type of a frame that begins the headers of a request.
const HEADERS_FRAME: u8 = 1;
/// The flags of such a frame: it has all headers; they are padded; a priority precedes them.
const FLAG_END_HEADERS: u8 = 0x4;
const FLAG_PADDED: u8 = 0x8;
const FLAG_PRIORITY: u8 = 0x20;
const PRIORITY_BYTES: usize = 5;
/// A longer frame is none that the server accepts.
const MAX_FRAME_BYTES: usize = 16 * 1024;
/// The number of the name `:authority` in the static table of HPACK.
const AUTHORITY_INDEX: usize = 1;
/// The literal of the new authority: its length, and one character.
const AUTHORITY_LITERAL: [u8; 2] = [1, b'm'];

/// A connection whose requests have a valid authority.
pub(super) struct AuthorityFilter<S> {
    stream: S,
    /// How many bytes pass as they are before the next frame begins.
    passing: usize,
    /// The bytes of a frame that is not there as a whole.
    partial: Vec<u8>,
    /// Bytes that are ready to be read.
    ready: Vec<u8>,
}

impl<S> AuthorityFilter<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, passing: PREFACE_BYTES, partial: Vec::new(), ready: Vec::new() }
    }

    /// Takes in bytes of the client.
    fn take_in(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.passing > 0 {
                let (passed, rest) = bytes.split_at(self.passing.min(bytes.len()));
                self.ready.extend_from_slice(passed);
                self.passing -= passed.len();
                bytes = rest;
                continue;
            }
            let wanted = frame_length(&self.partial).unwrap_or(FRAME_HEADER_BYTES);
            let (more, rest) = bytes.split_at((wanted - self.partial.len()).min(bytes.len()));
            self.partial.extend_from_slice(more);
            bytes = rest;
            let Some(length) = frame_length(&self.partial) else { continue };
            let has_headers = self.partial.get(3) == Some(&HEADERS_FRAME) && length <= MAX_FRAME_BYTES;
            if !has_headers {
                self.passing = length - self.partial.len();
                self.ready.append(&mut self.partial);
            } else if self.partial.len() == length {
                self.ready.extend(replace_authority(&self.partial).as_deref().unwrap_or(&self.partial));
                self.partial.clear();
            }
        }
    }
}

/// The length of a frame, its header included, once its header is there.
fn frame_length(frame: &[u8]) -> Option<usize> {
    let [a, b, c] = *frame.get(..FRAME_HEADER_BYTES)?.first_chunk()?;
    Some(FRAME_HEADER_BYTES + usize::from(a) * 0x1_0000 + usize::from(b) * 0x100 + usize::from(c))
}

/// A frame of headers with another authority; `None` if it names none.
fn replace_authority(frame: &[u8]) -> Option<Vec<u8>> {
    let flags = *frame.get(4)?;
    if flags & FLAG_END_HEADERS == 0 || flags & FLAG_PADDED != 0 {
        return None;
    }
    let begin = FRAME_HEADER_BYTES + if flags & FLAG_PRIORITY == 0 { 0 } else { PRIORITY_BYTES };
    let mut rest = frame.get(begin..)?;
    while !rest.is_empty() {
        let first = *rest.first()?;
        // A field in the table, or a new size of the table.
        if first & 0x80 != 0 || first & 0xe0 == 0x20 {
            read_integer(&mut rest, if first & 0x80 != 0 { 7 } else { 5 })?;
            continue;
        }
        let name = read_integer(&mut rest, if first & 0x40 != 0 { 6 } else { 4 })?;
        if name == 0 {
            read_string(&mut rest)?;
        }
        let from = frame.len() - rest.len();
        let value = read_string(&mut rest)?;
        if name == AUTHORITY_INDEX && !value.is_empty() {
            let new = [frame.get(FRAME_HEADER_BYTES..from)?, &AUTHORITY_LITERAL, rest].concat();
            let [_, length @ ..] = u32::try_from(new.len()).ok()?.to_be_bytes();
            return Some([&length, frame.get(length.len()..FRAME_HEADER_BYTES)?, &new].concat());
        }
    }
    None
}

/// Reads an integer whose first byte has this many bits of it.
fn read_integer(bytes: &mut &[u8], prefix: u32) -> Option<usize> {
    let most = (1_usize << prefix) - 1;
    let mut value = usize::from(*bytes.split_off_first()?) & most;
    if value < most {
        return Some(value);
    }
    for shift in [0, 7, 14] {
        let byte = *bytes.split_off_first()?;
        value += usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Reads a string, as it is spelled.
fn read_string<'b>(bytes: &mut &'b [u8]) -> Option<&'b [u8]> {
    let length = read_integer(bytes, 7)?;
    bytes.split_off(..length)
}

impl<S: AsyncRead + Unpin> AsyncRead for AuthorityFilter<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.ready.is_empty() {
            let before = into.filled().len();
            ready!(Pin::new(&mut this.stream).poll_read(cx, into))?;
            let read = into.filled().len() - before;
            if read == 0 {
                // The end; the rest of a frame is of no use without its end.
                return Poll::Ready(Ok(()));
            }
            if read <= this.passing {
                this.passing -= read;
                return Poll::Ready(Ok(()));
            }
            this.take_in(into.filled().get(before..).unwrap_or_default());
            into.set_filled(before);
        }
        let length = this.ready.len().min(into.remaining());
        into.put_slice(this.ready.get(..length).unwrap_or_default());
        this.ready.drain(..length);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AuthorityFilter<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    /// A frame.
    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    /// A literal that goes into the table, with the name of this number.
    fn literal(name: u8, value: &[u8]) -> Vec<u8> {
        [&[0x40 | name, u8::try_from(value.len()).unwrap()], value].concat()
    }

    async fn through(sent: &[u8], step: usize) -> Vec<u8> {
        let (mut near, far) = tokio::io::duplex(step);
        let sent = sent.to_vec();
        tokio::spawn(async move { tokio::io::AsyncWriteExt::write_all(&mut near, &sent).await.unwrap() });
        let mut read = Vec::new();
        AuthorityFilter::new(far).read_to_end(&mut read).await.unwrap();
        read
    }

    #[tokio::test]
    async fn authority_is_replaced_for_any_split_of_bytes() {
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        // A size of the table, `:method POST`, a path with a long length, and after the authority new names.
        let path = [&[0x44, 0x7f, 100], &[b'/'; 227][..]].concat();
        let last = [&[0x40][..], &[1, b'a'], &[1, b'b'], &[0x10, 1, b'c', 1, b'd'], &[0xbe]].concat();
        let headers = |authority: &[u8]| [&[0x3f, 0xe1, 0x1f, 0x83][..], &path, authority, &last].concat();
        let with = |authority: &[u8]| {
            let with_priority = [&[0; 5][..], &headers(authority)].concat();
            [
                &preface[..],
                &frame(4, 0, &[0; 6]),
                &frame(HEADERS_FRAME, 0x5, &headers(authority)),
                &frame(0, 0, &[7; 70_000]),
                &frame(HEADERS_FRAME, 0x25, &with_priority),
                &frame(6, 0, &[0; 8]),
            ]
            .concat()
        };
        for authority in [&b"http://127.0.0.1:2379"[..], b"unix:///run/etcd.sock", b"127.0.0.1:2379", b"a"] {
            for step in [1, 7, 1000, 1 << 20] {
                let read = through(&with(&literal(1, authority)), step).await;
                assert_eq!(read, with(&literal(1, b"m")), "{authority:?} {step}");
            }
        }
        // Whether a literal is coded or goes into the table makes no difference.
        for first in [0x41, 0x01, 0x11] {
            let read = through(&with(&[first, 0x82, 0xff, 0xff]), 1000).await;
            assert_eq!(read, with(&[first, 1, b'm']));
        }
    }

    /// Frames of headers that are damaged, in parts or padded are the server's business.
    #[tokio::test]
    async fn authority_filter_passes_other_frames() {
        let authority = literal(1, b"http://a");
        let mut sent = vec![0; PREFACE_BYTES];
        for (flags, headers) in [
            (0x1, authority.clone()),
            (0xd, authority.clone()),
            (0x5, authority[..4].to_vec()),
            (0x5, vec![0xff; 9]),
            (0x25, vec![0; 3]),
            (0x5, literal(1, b"")),
            (0x5, Vec::new()),
        ] {
            sent.extend(frame(HEADERS_FRAME, flags, &headers));
        }
        assert_eq!(through(&sent, 5).await, sent);
    }
}
