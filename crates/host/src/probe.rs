//! Checks whether a device on the link of an interface already uses an address.
//!
//! An IPv4 address is checked with the ARP probe of RFC 5227, a request with the sender address 0.0.0.0. An ARP request
//! with sender 0.0.0.0 does not change the ARP tables of other devices. An IPv6 address is checked with a neighbour
//! solicitation (RFC 4862). The solicitation is sent from the unspecified address to the solicited-node multicast group
//! of the checked address. Each probe is sent twice, at the beginning and after half of the timeout, since one packet
//! may be lost.

use std::fmt;
use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sys::socket::{LinkAddr, bind};
use socket2::{Domain, Protocol, Socket, Type};

use crate::machine::ip_of;

/// The kernel's constant `ARPHRD_ETHER`.
const ETHERNET: u16 = 1;
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;
const ICMPV6: u8 = 58;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// The type of the NDP option "target link-layer address" in a neighbour advertisement.
const TARGET_MAC: u8 = 2;
/// How long after its deadline a probe still reads packets that arrived before the deadline.
const READ_GRACE: Duration = Duration::from_millis(10);

/// The result of probing one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeResult {
    /// No device has answered the probe before the deadline.
    Silent,
    /// A device on the link uses the probed address. `Answered` contains the MAC address of the device that answered,
    /// if the answer contains one.
    Answered(Option<Mac>),
    /// The address could not be probed; the string is the reason.
    Unable(String),
}

/// The MAC address of an Ethernet device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac([u8; 6]);

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// Probes several addresses in parallel, on the link of an interface in this network namespace. The results are in the
/// same order as the addresses. If the interface itself has a probed address, the result is an answer with the
/// interface's own MAC address.
///
/// The function blocks until `timeout` has passed, or until devices have answered for all addresses.
pub fn probe(interface: &str, addresses: &[IpAddr], timeout: Duration) -> Vec<ProbeResult> {
    let link = match Link::find(interface) {
        Ok(link) => link,
        Err(reason) => return vec![ProbeResult::Unable(reason); addresses.len()],
    };
    let mut probes: Vec<Probe> = addresses.iter().map(|address| Probe::new(&link, *address)).collect();
    let begun = Instant::now();
    for half in 1..=2 {
        probes.iter_mut().for_each(Probe::send);
        // While this loop reads the answers to one probe, answers to the other probes wait in their sockets.
        probes.iter_mut().for_each(|probe| probe.listen(begun + timeout * half / 2));
    }
    probes.into_iter().map(|probe| probe.outcome).collect()
}

/// An Ethernet interface that is up.
struct Link {
    name: String,
    address: LinkAddr,
    mac: Mac,
    /// The interface's own IP addresses.
    own: Vec<IpAddr>,
}

impl Link {
    fn find(name: &str) -> Result<Self, String> {
        let listed =
            getifaddrs().map_err(|error| format!("the interfaces of this machine cannot be listed: {error}"))?;
        let (mut found, mut own) = (None, Vec::new());
        for one in listed.filter(|one| one.interface_name == name) {
            let Some(address) = one.address else { continue };
            if let Some(link) = address.as_link_addr() {
                found = Some((*link, one.flags));
            }
            own.extend(ip_of(&address));
        }
        let (address, flags) =
            found.ok_or_else(|| format!("there is no interface {name} in the plugin's namespace"))?;
        match address.addr().filter(|_| address.hatype() == ETHERNET) {
            None => Err(format!("interface {name} is not an Ethernet one")),
            Some(_) if !flags.contains(InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING) => {
                Err(format!("the link of interface {name} is down"))
            }
            Some(mac) => Ok(Self { name: name.to_owned(), address, mac: Mac(mac), own }),
        }
    }

    /// Opens a socket that sends whole Ethernet frames, and receives the frames of one protocol (none if `protocol` is
    /// 0).
    fn frames(&self, protocol: u16) -> io::Result<Socket> {
        let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(i32::from(protocol.to_be()))))?;
        bind(socket.as_raw_fd(), &self.address)?;
        Ok(socket)
    }

    /// Opens a socket that receives the ICMPv6 messages of the interface.
    fn messages(&self) -> io::Result<Socket> {
        let off = fs::read_to_string(format!("/proc/sys/net/ipv6/conf/{}/disable_ipv6", self.name));
        if off.is_ok_and(|off| off.trim() == "1") {
            return Err(io::Error::other("IPv6 is disabled on it"));
        }
        let socket = Socket::new(Domain::IPV6, Type::RAW, Some(Protocol::ICMPV6))?;
        socket.bind_device(Some(self.name.as_bytes()))?;
        Ok(socket)
    }
}

struct Probe {
    address: IpAddr,
    own: Mac,
    /// The Ethernet frame that the probe sends.
    frame: Vec<u8>,
    /// The socket that sends the frame, and for IPv6 a second socket that receives the answers; `None` if the probe has
    /// failed or needs no packets.
    sockets: Option<(Socket, Option<Socket>)>,
    outcome: ProbeResult,
}

impl Probe {
    fn new(link: &Link, address: IpAddr) -> Self {
        let own = link.mac;
        let mut probe = Self { address, own, frame: Vec::new(), sockets: None, outcome: ProbeResult::Silent };
        if link.own.contains(&address) {
            probe.outcome = ProbeResult::Answered(Some(own));
            return probe;
        }
        let opened = match address {
            IpAddr::V4(address) => {
                probe.frame = arp_probe(own, address);
                link.frames(ARP).map(|socket| (socket, None))
            }
            IpAddr::V6(address) => {
                probe.frame = solicitation(own, address);
                link.messages().and_then(|messages| Ok((link.frames(0)?, Some(messages))))
            }
        };
        match opened {
            Ok(sockets) => probe.sockets = Some(sockets),
            Err(error) => probe.fail(link.name.as_str(), &error),
        }
        probe
    }

    fn fail(&mut self, what: &str, error: &io::Error) {
        self.outcome = ProbeResult::Unable(format!("{what}: {error}"));
        self.sockets = None;
    }

    fn send(&mut self) {
        let Some((socket, _)) = self.sockets.as_mut().filter(|_| self.outcome == ProbeResult::Silent) else { return };
        if let Err(error) = socket.write_all(&self.frame) {
            self.fail("the probe was not sent", &error);
        }
    }

    /// Reads packets until a device has answered for the probed address, or the deadline `until` has passed.
    fn listen(&mut self, until: Instant) {
        let mut bytes = [0_u8; 1500];
        while self.outcome == ProbeResult::Silent {
            let Some((sender, receiver)) = &mut self.sockets else { return };
            let socket = receiver.as_mut().unwrap_or(sender);
            let now = Instant::now();
            let left = until.saturating_duration_since(now).max(Duration::from_millis(1));
            let read = socket.set_read_timeout(Some(left)).and_then(|()| socket.read(&mut bytes));
            match read {
                Ok(length) => {
                    let packet = bytes.get(..length).unwrap_or_default();
                    let answered = match self.address {
                        IpAddr::V4(address) => arp_sender(packet, address).map(Some),
                        IpAddr::V6(address) => parse_advertisement(packet, address),
                    };
                    if let Some(mac) = answered.filter(|mac| *mac != Some(self.own)) {
                        self.outcome = ProbeResult::Answered(mac);
                    }
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => self.fail("no answer can be read", &error),
            }
            if now >= until + READ_GRACE {
                return;
            }
        }
    }
}

fn ethernet(to: [u8; 6], from: Mac, protocol: u16) -> Vec<u8> {
    [&to[..], &from.0, &protocol.to_be_bytes()].concat()
}

/// Builds a broadcast ARP request for an address, with the sender address 0.0.0.0.
fn arp_probe(own: Mac, address: Ipv4Addr) -> Vec<u8> {
    let mut frame = ethernet([0xff; 6], own, ARP);
    // The ARP header contains the hardware type Ethernet, the protocol IPv4, the lengths of a MAC and an IPv4 address,
    // and the operation "request".
    frame.extend([0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(own.0);
    frame.extend([0; 4 + 6]);
    frame.extend(address.octets());
    frame
}

/// The sender's MAC address in an ARP packet, if the packet shows that the sender uses the probed address.
fn arp_sender(frame: &[u8], address: Ipv4Addr) -> Option<Mac> {
    let is_ours = frame.get(12..20)? == [8, 6, 0, 1, 8, 0, 6, 4] && frame.get(28..32)? == address.octets();
    let mac = frame.get(22..28).filter(|_| is_ours)?;
    mac.try_into().ok().map(Mac)
}

/// Builds a neighbour solicitation for an address, sent from the unspecified address to the solicited-node multicast
/// group of that address.
fn solicitation(own: Mac, address: Ipv6Addr) -> Vec<u8> {
    let target = address.octets();
    let [.., a, b, c] = target;
    let group = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c];
    let mut message = [&[SOLICITATION, 0, 0, 0, 0, 0, 0, 0][..], &target].concat();
    let sum = checksum(&[&group[..], &[0, 24, 0, ICMPV6], &message].concat()).to_be_bytes();
    message.splice(2..4, sum);
    let mut frame = ethernet([0x33, 0x33, 0xff, a, b, c], own, IPV6);
    // The IPv6 header contains the version 6, the length of 24 bytes, the protocol ICMPv6, and the hop limit 255. The
    // hop limit 255 proves that no router has forwarded the packet.
    frame.extend([0x60, 0, 0, 0, 0, 24, ICMPV6, 255]);
    frame.extend([0; 16]);
    frame.extend(group);
    frame.extend(message);
    frame
}

/// Returns `Some` if an ICMPv6 message is a neighbour advertisement for the probed address. `Some(None)` means that the
/// advertisement does not contain its sender's MAC address.
fn parse_advertisement(message: &[u8], address: Ipv6Addr) -> Option<Option<Mac>> {
    if *message.first()? != ADVERTISEMENT || message.get(8..24)? != address.octets() {
        return None;
    }
    let mut options = message.get(24..).unwrap_or_default();
    while let [kind, length, ..] = options {
        if *kind == TARGET_MAC {
            return Some(options.get(2..8).and_then(|mac| mac.try_into().ok()).map(Mac));
        }
        // The length of an NDP option is in units of 8 bytes. A length of 0 is invalid and ends the parsing of the NDP
        // options.
        let length = usize::from(*length).checked_sub(1).map(|more| 8 + more * 8);
        options = length.and_then(|length| options.get(length..)).unwrap_or_default();
    }
    Some(None)
}

/// The internet checksum (RFC 1071) over an even number of bytes. The source address of the pseudo-header is the
/// unspecified address, which consists of zeros and does not change the checksum.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.as_chunks::<2>().0.iter().map(|word| u32::from(u16::from_be_bytes(*word)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    const OWN: Mac = Mac([2, 0, 0, 0, 0, 0x0a]);

    #[test]
    fn arp_probe_names_no_sender() {
        let address = Ipv4Addr::new(10, 9, 0, 2);
        let mut frame = arp_probe(OWN, address);
        assert_eq!((frame.len(), &frame[28..32], &frame[38..42]), (42, &[0; 4][..], &[10, 9, 0, 2][..]));
        assert_eq!(arp_sender(&frame, address), None, "another one's probe is no answer");
        frame[28..32].copy_from_slice(&address.octets());
        assert_eq!(arp_sender(&frame, address).unwrap().to_string(), "02:00:00:00:00:0a");
        assert_eq!(arp_sender(&frame, Ipv4Addr::new(10, 9, 0, 3)), None);
        for length in 0..32 {
            assert_eq!(arp_sender(&frame[..length], address), None, "{length} bytes");
        }
    }

    #[test]
    fn ndp_solicitation_has_right_checksum() {
        let frame = solicitation(OWN, "fd00::1:2:3".parse().unwrap());
        assert_eq!(&frame[..6], [0x33, 0x33, 0xff, 2, 0, 3]);
        assert_eq!(frame.len(), 14 + 40 + 24);
        // The checksum over a message that already includes its correct checksum is 0.
        assert_eq!(checksum(&[&frame[38..54], &[0, 24, 0, ICMPV6], &frame[54..]].concat()), 0);
    }

    #[test]
    fn ndp_advertisement_names_its_sender() {
        let address: Ipv6Addr = "fd00::2".parse().unwrap();
        let head = [&[ADVERTISEMENT, 0, 0, 0, 0x20, 0, 0, 0][..], &address.octets()].concat();
        assert_eq!(parse_advertisement(&head, address), Some(None));
        let other = [14, 1, 0, 0, 0, 0, 0, 0];
        let message = [&head[..], &other, &[TARGET_MAC, 1], &OWN.0].concat();
        assert_eq!(parse_advertisement(&message, address), Some(Some(OWN)));
        assert_eq!(parse_advertisement(&message, "fd00::3".parse().unwrap()), None);
        for length in 0..message.len() {
            parse_advertisement(&message[..length], address);
        }
        assert_eq!(
            parse_advertisement(&[&head[..], &[1, 0, 0]].concat(), address),
            Some(None),
            "an option without a length"
        );
    }

    #[test]
    fn probe_is_impossible_without_wire() {
        let asked = |interface| probe(interface, &["10.9.0.2".parse().unwrap()], Duration::from_millis(1));
        for (interface, reason) in [("no-such", "there is no interface no-such"), ("lo", "not an Ethernet one")] {
            let [ProbeResult::Unable(said)] = &asked(interface)[..] else { panic!("{interface} can be asked") };
            assert!(said.contains(reason), "{said}");
        }
    }
}
