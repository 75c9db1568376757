//! A small DNS server that answers queries for SRV records. Names without SRV records do not exist.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError};

/// Priority, weight and port of an SRV record, whose target is always `localhost`.
pub type Srv = (u16, u16, u16);

/// The DNS type number of SRV records.
const SRV: [u8; 2] = [0, 33];

/// A DNS server that runs until the process ends.
#[derive(Clone, Debug)]
pub struct Dns {
    pub address: SocketAddr,
    records: Arc<Mutex<HashMap<String, Vec<Srv>>>>,
}

impl Dns {
    /// Starts a DNS server on a free port.
    pub fn start() -> io::Result<Self> {
        Self::start_at(SocketAddr::from(([127, 0, 0, 1], 0)))
    }

    pub fn start_at(address: SocketAddr) -> io::Result<Self> {
        let socket = UdpSocket::bind(address)?;
        let dns = Self { address: socket.local_addr()?, records: Arc::default() };
        let serving = dns.clone();
        std::thread::spawn(move || serving.serve(&socket));
        Ok(dns)
    }

    /// Replaces the SRV records that the server returns for a name.
    pub fn set(&self, name: &str, records: &[Srv]) {
        self.records.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), records.to_vec());
    }

    fn serve(&self, socket: &UdpSocket) {
        let mut buffer = [0; 512];
        while let Ok((length, asker)) = socket.recv_from(&mut buffer) {
            if let Some(answer) = self.answer(&buffer[..length]) {
                // Sending the answer fails if the client has closed its socket by now.
                let _ = socket.send_to(&answer, asker);
            }
        }
    }

    fn answer(&self, query: &[u8]) -> Option<Vec<u8>> {
        let (name, length) = name(query.get(12..)?)?;
        let question = query.get(12..12 + length + 4)?;
        let known = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        let records = known.get(&name).filter(|_| question[length..length + 2] == SRV);
        let mut answer = query.get(..2)?.to_vec();
        let count = u8::try_from(records.map_or(0, Vec::len)).ok()?;
        answer.extend([0x81, if records.is_some() { 0x80 } else { 0x83 }, 0, 1, 0, count, 0, 0, 0, 0]);
        answer.extend(question);
        for (priority, weight, port) in records.into_iter().flatten() {
            // The answer record: a pointer to the name in the question, type SRV, class IN, and a TTL of 0.
            answer.extend([0xc0, 12, SRV[0], SRV[1], 0, 1, 0, 0, 0, 0, 0, 17]);
            answer.extend([priority, weight, port].into_iter().flat_map(|number| number.to_be_bytes()));
            answer.extend(b"\x09localhost\x00");
        }
        Some(answer)
    }
}

/// Parses a DNS name at the start of `bytes`. Returns the name and its encoded length in bytes.
fn name(bytes: &[u8]) -> Option<(String, usize)> {
    let mut labels = Vec::new();
    let mut at = 0;
    loop {
        let length = usize::from(*bytes.get(at)?);
        at += 1;
        if length == 0 {
            return Some((labels.join("."), at));
        }
        labels.push(String::from_utf8_lossy(bytes.get(at..at + length)?).to_lowercase());
        at += length;
    }
}
