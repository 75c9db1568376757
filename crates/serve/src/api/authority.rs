//! Repairs HTTP/2 requests with an invalid `:authority`. Debian's etcdctl 3.4 sends an authority that includes the
//! scheme of an endpoint `http://HOST:PORT`. Go programs send the path of a unix socket as the authority.
//!
//! The HTTP/2 library rejects a request with an invalid authority before a service can correct the request
//! (hyperium/h2#487). Margay never uses the authority of a request. The filter in this module reads the client's bytes
//! before the HTTP/2 library, and replaces each authority literal with a valid literal. Header compression (HPACK, RFC
//! 7541) keeps literals in a table for later requests. The HPACK table indexes its entries from the newest, and evicts
//! the oldest entries when it is full. The replacement is never longer than the client's literal, so it evicts no HPACK
//! table entry that the client still refers to.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Length in bytes of the HTTP/2 connection preface.
const PREFACE_BYTES: usize = 24;
const FRAME_HEADER_BYTES: usize = 9;
const HEADERS_FRAME: u8 = 1;
/// Flags of an HTTP/2 HEADERS frame: all headers are in this frame, the payload is padded, and a priority precedes the
/// headers.
const FLAG_END_HEADERS: u8 = 0x4;
const FLAG_PADDED: u8 = 0x8;
const FLAG_PRIORITY: u8 = 0x20;
const PRIORITY_BYTES: usize = 5;
/// Size in bytes of the largest HTTP/2 frame that the server accepts.
const MAX_FRAME_BYTES: usize = 16 * 1024;
/// Index of the name `:authority` in HPACK's static table.
const AUTHORITY_INDEX: usize = 1;
/// The valid authority literal in HPACK encoding: its length and one character.
const AUTHORITY_LITERAL: [u8; 2] = [1, b'm'];

/// A client connection whose requests get a valid authority.
pub(super) struct AuthorityFilter<S> {
    stream: S,
    /// Number of bytes to pass through unchanged before the next frame begins.
    passing: usize,
    /// The bytes of an incomplete frame received until now.
    partial: Vec<u8>,
    /// Filtered bytes that the HTTP/2 library has not read yet.
    ready: Vec<u8>,
}

impl<S> AuthorityFilter<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, passing: PREFACE_BYTES, partial: Vec::new(), ready: Vec::new() }
    }

    /// Filters bytes from the client and appends the result to `ready`.
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

/// Returns the length in bytes of an HTTP/2 frame including the frame header, or `None` while the header is incomplete.
fn frame_length(frame: &[u8]) -> Option<usize> {
    let [a, b, c] = *frame.get(..FRAME_HEADER_BYTES)?.first_chunk()?;
    Some(FRAME_HEADER_BYTES + usize::from(a) * 0x1_0000 + usize::from(b) * 0x100 + usize::from(c))
}

/// Returns a HEADERS frame in which the valid authority replaces the client's authority. Returns `None` if the frame
/// has no authority or cannot be parsed.
fn replace_authority(frame: &[u8]) -> Option<Vec<u8>> {
    let flags = *frame.get(4)?;
    if flags & FLAG_END_HEADERS == 0 || flags & FLAG_PADDED != 0 {
        return None;
    }
    let begin = FRAME_HEADER_BYTES + if flags & FLAG_PRIORITY == 0 { 0 } else { PRIORITY_BYTES };
    let mut rest = frame.get(begin..)?;
    while !rest.is_empty() {
        let first = *rest.first()?;
        // A header field whose first bits are 1 or 001 is an indexed field or a table size update, and has no literal.
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

/// Reads an HPACK integer whose first byte has `prefix` bits for the value.
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

/// Reads an HPACK string without decoding its Huffman code.
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
                // The client has ended the connection, so an incomplete frame is dropped.
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

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    /// Returns an HPACK literal that enters the HPACK table, with the header name at index `name`.
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
        // The header block has a table size update, `:method POST`, a path whose length needs more than one byte, and
        // new header names after the authority.
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
        // Huffman-coded authority literals are replaced whether or not they enter the table.
        for first in [0x41, 0x01, 0x11] {
            let read = through(&with(&[first, 0x82, 0xff, 0xff]), 1000).await;
            assert_eq!(read, with(&[first, 1, b'm']));
        }
    }

    /// The filter passes damaged, split and padded HEADERS frames to the server unchanged.
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
