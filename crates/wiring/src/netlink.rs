//! Sends netlink requests to the kernel, with as few system calls as possible.
//!
//! A netlink message may contain several requests. The kernel processes the requests of a message in order, before the
//! system call `send` returns. The kernel reports each failed request, and continues with the next request. Only the
//! last request of a message needs an acknowledgement, because the kernel processes requests in order. Once the
//! acknowledgement has arrived, every request without a reported error has succeeded.

use std::cell::{Cell, RefCell};

use netlink_packet_core::{
    Emitable, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader,
};
use nix::libc::{MSG_DONTWAIT, MSG_TRUNC};
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::SndBufForce;

use crate::error::{Errno, Error};

/// The message types that exist in every netlink protocol (`linux/netlink.h`).
const ERROR_MESSAGE: u16 = 2;
const DONE_MESSAGE: u16 = 3;

/// Maximum size in bytes of one message from the kernel. The kernel splits a long listing into several messages.
const MAX_PART_BYTES: usize = 32 * 1024;
/// Maximum number of attempts to read a consistent listing. A listing is inconsistent if the listed objects change
/// while the kernel sends the listing.
const MAX_LISTING_ATTEMPTS: usize = 5;
/// Size in bytes of the longest message that fits into a socket's default send buffer.
const DEFAULT_SEND_BUFFER_BYTES: usize = 32 * 1024;

#[derive(Debug)]
pub(crate) struct NetlinkRequest {
    kind: u16,
    flags: u16,
    /// `NLM_F_ACK` if the kernel's only answer to the request is an acknowledgement, otherwise 0.
    confirm: u16,
    body: Vec<u8>,
    /// The start of the error message if the kernel refuses the request, followed by the kernel's reason; empty for the
    /// kernel's reason alone.
    failure: String,
}

impl NetlinkRequest {
    /// Creates a request that changes something in the kernel, with the message type `kind` (`RTM_..`). The given flags
    /// (`NLM_F_..`) are added to the flags that every request has.
    pub(crate) fn change(kind: u16, flags: u16, body: &impl Emitable) -> Self {
        let mut bytes = vec![0; body.buffer_len()];
        body.emit(&mut bytes);
        Self { kind, flags, confirm: NLM_F_ACK, body: bytes, failure: String::new() }
    }

    /// Creates a request that reads information from the kernel, with the message type `kind` (`RTM_..`).
    pub(crate) fn tell(kind: u16, body: &impl Emitable) -> Self {
        Self { confirm: 0, ..Self::change(kind, 0, body) }
    }

    /// Sets the start of the error message if the kernel refuses the request; the kernel's reason follows. By default,
    /// the error message consists of the kernel's reason alone.
    pub(crate) fn with_failure(mut self, failure: String) -> Self {
        self.failure = failure;
        self
    }

    fn write(&self, message: &mut Vec<u8>, flags: u16, sequence: u32) -> Result<(), Errno> {
        let mut header = NetlinkHeader::default();
        let from = message.len();
        let length = header.buffer_len() + self.body.len();
        header.length = u32::try_from(length).map_err(|_| Errno::TOO_LONG)?;
        header.message_type = self.kind;
        header.flags = self.flags | flags | NLM_F_REQUEST;
        header.sequence_number = sequence;
        message.resize(from + header.buffer_len(), 0);
        header.emit(&mut message[from..]);
        message.extend_from_slice(&self.body);
        // Each request in a netlink message must begin at a multiple of four bytes.
        message.resize(message.len().next_multiple_of(4), 0);
        Ok(())
    }
}

/// The kernel's answer to one request: the reply, which may be empty, or the error number of the refusal.
pub(crate) type Reply = Result<Vec<u8>, Errno>;

/// A netlink socket for requests to the kernel. The socket belongs to the network namespace in which it was opened,
/// whichever thread uses the socket.
pub(crate) struct NetlinkSocket {
    socket: netlink_sys::Socket,
    sequence: Cell<u32>,
    buffer: RefCell<Vec<u8>>,
}

impl NetlinkSocket {
    /// Opens a socket of a netlink protocol (`NETLINK_..`) in the network namespace of the calling thread.
    pub(crate) fn open(protocol: isize) -> Result<Self, Errno> {
        let socket = netlink_sys::Socket::new(protocol).map_err(|error| Errno::from(&error))?;
        Ok(Self { socket, sequence: Cell::new(0), buffer: RefCell::new(Vec::with_capacity(MAX_PART_BYTES)) })
    }

    /// Opens a netlink socket for interfaces, addresses and routes, in the network namespace of the calling thread.
    pub(crate) fn route() -> Result<Self, Error> {
        let opened = Self::open(netlink_sys::protocols::NETLINK_ROUTE);
        let socket = opened.map_err(|errno| Error::failed("failed to open a netlink socket", errno))?;
        // With the socket option for strict checking, the kernel filters listings as the request says. Kernels before
        // 4.20 ignore the filter of a listing request and list everything, so the callers filter the listing
        // themselves.
        let _ = socket.socket.set_netlink_get_strict_chk(true);
        Ok(socket)
    }

    /// Sends several requests in one netlink message, and returns the kernel's answer to each request.
    pub(crate) fn exchange(&self, requests: &[NetlinkRequest]) -> Result<Vec<Reply>, Errno> {
        let Some(last) = requests.len().checked_sub(1) else { return Ok(Vec::new()) };
        let first = self.sequence.get().wrapping_add(1);
        let mut message = Vec::with_capacity(requests.iter().map(|request| request.body.len() + 20).sum());
        for (request, sequence) in requests.iter().zip(first..) {
            let confirm = if sequence.wrapping_sub(first) as usize == last { request.confirm } else { 0 };
            request.write(&mut message, confirm, sequence)?;
        }
        self.send(&message, first, requests.len())?;

        let mut answers = vec![Ok(Vec::new()); requests.len()];
        let mut complete = false;
        while !complete {
            self.receive(|header, payload| {
                let at = header.sequence_number().wrapping_sub(first) as usize;
                let Some(answer) = answers.get_mut(at) else { return Ok(()) };
                if header.message_type() != ERROR_MESSAGE {
                    *answer = Ok(payload.to_vec());
                } else if let Some(errno) = refusal(payload)? {
                    *answer = Err(errno);
                }
                complete |= at == last;
                Ok(())
            })?;
        }
        Ok(answers)
    }

    /// Sends several requests like [`exchange`](Self::exchange), but fails with the error of the first refused request.
    pub(crate) fn all(&self, requests: &[NetlinkRequest]) -> Result<Vec<Vec<u8>>, Error> {
        let answers = self.exchange(requests).map_err(|errno| Error::failed("failed to talk to the kernel", errno))?;
        let answers = answers.into_iter().zip(requests);
        answers.map(|(answer, request)| answer.map_err(|errno| Error::failed(&request.failure, errno))).collect()
    }

    /// Carries out either all requests or none of them, as an nfnetlink batch between the two messages `begin` and
    /// `end`. The error consists of the failure text of the first refused request, and the kernel's reason.
    ///
    /// A kernel without batch support answers the message `begin` with an error. If the kernel accepts the batch, it
    /// acknowledges the last request.
    pub(crate) fn batch(
        &self,
        begin: &NetlinkRequest,
        requests: &[NetlinkRequest],
        end: &NetlinkRequest,
    ) -> Result<(), (String, Errno)> {
        let talk = |errno| (begin.failure.clone(), errno);
        let all: Vec<&NetlinkRequest> = std::iter::once(begin).chain(requests).chain([end]).collect();
        let first = self.sequence.get().wrapping_add(1);
        let mut message = Vec::new();
        for (at, request) in all.iter().enumerate() {
            let confirm = if at == requests.len() { NLM_F_ACK } else { 0 };
            let sequence = u32::try_from(at).map_err(|_| talk(Errno::TOO_LONG))?.wrapping_add(first);
            request.write(&mut message, confirm, sequence).map_err(talk)?;
        }
        // The kernel accepts a batch only as a single message, so enlarge the send buffer if needed. If the send buffer
        // cannot be enlarged, sending the batch fails.
        if message.len() > DEFAULT_SEND_BUFFER_BYTES {
            let _ = setsockopt(&self.socket, SndBufForce, &(4 * message.len()));
        }
        self.send(&message, first, all.len()).map_err(talk)?;

        let (mut complete, mut refused) = (false, None);
        while !complete && refused.is_none() {
            let took = self.receive(|header, payload| {
                let at = header.sequence_number().wrapping_sub(first) as usize;
                if let Some(request) = all.get(at)
                    && header.message_type() == ERROR_MESSAGE
                {
                    complete |= at == requests.len();
                    let refusal = refusal(payload)?;
                    refused = refused.take().or(refusal.map(|errno| (request.failure.clone(), errno)));
                }
                Ok(())
            });
            took.map_err(talk)?;
        }
        refused.map_or(Ok(()), Err)
    }

    pub(crate) fn one(&self, request: NetlinkRequest) -> Reply {
        self.exchange(&[request])?.pop().unwrap_or(Err(Errno::GARBLED))
    }

    /// Returns all entries that the kernel lists in reply to a request, and repeats the request if the listing was
    /// inconsistent.
    pub(crate) fn list(&self, request: &NetlinkRequest) -> Result<Vec<Vec<u8>>, Errno> {
        for _ in 1..MAX_LISTING_ATTEMPTS {
            if let Some(listed) = self.list_once(request)? {
                return Ok(listed);
            }
        }
        self.list_once(request)?.ok_or(Errno::BUSY)
    }

    /// Requests a listing from the kernel once. Returns `None` if the listing is inconsistent, because the listed
    /// objects changed meanwhile.
    fn list_once(&self, request: &NetlinkRequest) -> Result<Option<Vec<Vec<u8>>>, Errno> {
        let sequence = self.sequence.get().wrapping_add(1);
        let mut message = Vec::new();
        request.write(&mut message, NLM_F_DUMP, sequence)?;
        self.send(&message, sequence, 1)?;
        let (mut listed, mut complete, mut whole) = (Vec::new(), false, true);
        while !complete {
            self.receive(|header, payload| {
                if header.sequence_number() != sequence {
                    return Ok(());
                }
                whole &= header.flags() & NLM_F_DUMP_INTR == 0;
                match header.message_type() {
                    DONE_MESSAGE => {
                        complete = true;
                        refusal(payload)?.map_or(Ok(()), Err)?;
                    }
                    ERROR_MESSAGE => return Err(refusal(payload)?.unwrap_or(Errno::GARBLED)),
                    _ => listed.push(payload.to_vec()),
                }
                Ok(())
            })?;
        }
        Ok(whole.then_some(listed))
    }

    /// Sends a netlink message of `count` requests, numbered from `first`.
    fn send(&self, message: &[u8], first: u32, count: usize) -> Result<(), Errno> {
        let used = u32::try_from(count).map_err(|_| Errno::TOO_LONG)?;
        self.sequence.set(first.wrapping_add(used).wrapping_sub(1));
        self.socket.send(message, 0).map(drop).map_err(|error| Errno::from(&error))
    }

    /// Receives one message from the kernel, and calls `show` for each of its parts.
    ///
    /// When `send` returns, the socket already has the kernel's answer. If the answer is a long listing, the kernel
    /// produces the rest while the program reads the listing. This function never waits: the kernel has answered during
    /// `send`, so an answer that is not in the socket yet will never arrive.
    fn receive(&self, mut show: impl FnMut(&NetlinkBuffer<&[u8]>, &[u8]) -> Result<(), Errno>) -> Result<(), Errno> {
        let mut buffer = self.buffer.borrow_mut();
        buffer.clear();
        let size = self.socket.recv(&mut *buffer, MSG_DONTWAIT | MSG_TRUNC).map_err(|error| Errno::from(&error))?;
        if size > buffer.len() {
            return Err(Errno::GARBLED);
        }
        let mut rest = buffer.as_slice();
        while !rest.is_empty() {
            let part = NetlinkBuffer::new_checked(rest).map_err(|_| Errno::GARBLED)?;
            show(&part, part.payload())?;
            rest = rest.get((part.length() as usize).next_multiple_of(4)..).unwrap_or_default();
        }
        Ok(())
    }
}

/// Returns the error number in the kernel's last message about a request, or `None` if the request succeeded.
fn refusal(payload: &[u8]) -> Result<Option<Errno>, Errno> {
    let code = payload.first_chunk().copied().map(i32::from_ne_bytes).ok_or(Errno::GARBLED)?;
    Ok((code != 0).then_some(Errno(code.wrapping_neg())))
}
