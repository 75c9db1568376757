//! Looks up etcd's members in DNS SRV records, like etcd's own client.
//!
//! The discovery module sends DNS queries itself; the crates `simple-dns` and `resolv-conf` parse the messages and
//! `/etc/resolv.conf`. A full resolver library would make the plugin 450 KB larger and a release build half a minute
//! longer, although the client needs only SRV queries.

use std::cmp::Reverse;
use std::collections::hash_map::RandomState;
use std::future::Future;
use std::hash::{BuildHasher, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;
use std::{fs, io};

use futures::stream::{FuturesUnordered, StreamExt};
use kv::{Error, ErrorKind, Operation, Result};
use simple_dns::rdata::RData;
use simple_dns::{CLASS, Name, Packet, PacketFlag, Question, RCODE, TYPE};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use crate::address::{Address, TlsUse, Transport};
use crate::error::STORE_NAME;
use crate::options::Discovery;

const RESOLV_CONF: &str = "/etc/resolv.conf";
const DNS_PORT: u16 = 53;
/// Maximum size in bytes of a UDP answer to a DNS query without EDNS (RFC 1035); longer answers need TCP.
const MAX_UDP_BYTES: usize = 512;

/// Returns the members from a domain's SRV records, ordered by priority and weight. If the domain has SRV records for
/// members with TLS, only these members are returned. Members without TLS are returned only if the domain has no SRV
/// records for members with TLS, and TLS is not configured.
///
/// # Errors
/// The error `NotSent` if the domain has no SRV records for usable members, or if no name server answers.
pub(crate) async fn resolve_members(discovery: &Discovery, tls: TlsUse) -> Result<Vec<Address>> {
    let domain = discovery.domain.trim_end_matches('.');
    let resolver = match discovery.name_server {
        Some(address) => Resolver::of(address),
        None => Resolver::of_system().map_err(|error| lookup_failed("DNS cannot be asked").with_source(error))?,
    };
    let with_tls = lookup_service(&resolver, "_etcd-client-ssl", domain, Transport::Tls).await;
    match (with_tls, tls) {
        (Ok(found), _) if !found.is_empty() => Ok(found),
        (with_tls, TlsUse::Configured) => {
            let none = lookup_failed(format!("there is no record _etcd-client-ssl._tcp.{domain}; check the domain"));
            Err(with_tls.err().unwrap_or(none))
        }
        (with_tls, TlsUse::NotConfigured) => {
            let plain = lookup_service(&resolver, "_etcd-client", domain, Transport::Plain).await;
            match (plain, with_tls) {
                // If the lookup of the TLS records fails, the store must not fall back to connections without TLS.
                (_, Err(error)) | (Err(error), _) => Err(error),
                (Ok(found), Ok(_)) if found.is_empty() => Err(lookup_failed(format!(
                    "there is neither a record _etcd-client-ssl._tcp.{domain} nor _etcd-client._tcp.{domain}; check the domain"
                ))),
                (found, _) => found,
            }
        }
    }
}

/// Returns the members from the SRV records of one service; the list is empty if there are no records.
async fn lookup_service(
    resolver: &Resolver,
    service: &str,
    domain: &str,
    transport: Transport,
) -> Result<Vec<Address>> {
    let name = format!("{service}._tcp.{domain}");
    let answer = resolver.srv(&name).await;
    let mut records = answer.map_err(|error| lookup_failed(format!("no answer about {name}")).with_source(error))?;
    // An SRV record whose target is the root domain means that the service does not exist.
    records.retain(|record| !record.target.is_empty());
    records.sort_by_key(|record| (record.priority, Reverse(record.weight)));
    records.into_iter().map(|record| Address::of_host(&record.target, record.port, transport)).collect()
}

fn lookup_failed(detail: impl AsRef<str>) -> Error {
    let detail = format!("failed to discover etcd endpoints through SRV discovery: {}", detail.as_ref());
    Error::new(ErrorKind::NotSent, Operation::Open, STORE_NAME).with_detail(detail)
}

#[derive(Debug, PartialEq, Eq)]
struct SrvRecord {
    priority: u16,
    weight: u16,
    port: u16,
    /// The host name of the member without the trailing dot; empty if the service does not exist.
    target: String,
}

/// The DNS name servers to query, with the number of attempts and the timeout.
#[derive(Debug)]
struct Resolver {
    name_servers: Vec<SocketAddr>,
    attempts: u32,
    timeout: Duration,
}

impl Resolver {
    fn of(name_server: SocketAddr) -> Self {
        Self { name_servers: vec![name_server], ..Self::parse("") }
    }

    /// Reads `/etc/resolv.conf`. As in libc, a missing or empty `/etc/resolv.conf` means that a name server runs on
    /// this host.
    ///
    /// # Errors
    /// Any error of reading `/etc/resolv.conf`, except that the file is missing.
    fn of_system() -> io::Result<Self> {
        match fs::read(RESOLV_CONF) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::parse("")),
            text => text.map(Self::parse),
        }
    }

    fn parse(resolv_conf: impl AsRef<[u8]>) -> Self {
        // Invalid lines of `/etc/resolv.conf` are ignored, as in libc.
        let (config, _) = resolv_conf::Config::parse_with_errors(resolv_conf.as_ref());
        let mut name_servers: Vec<_> =
            config.nameservers.iter().map(|server| SocketAddr::new(server.into(), DNS_PORT)).collect();
        if name_servers.is_empty() {
            name_servers.push((Ipv4Addr::LOCALHOST, DNS_PORT).into());
        }
        // The man page resolv.conf(5) limits the number of attempts to 5 and the timeout to 30 seconds.
        let timeout = Duration::from_secs(config.timeout.clamp(1, 30).into());
        Self { name_servers, attempts: config.attempts.clamp(1, 5), timeout }
    }

    /// Looks up the SRV records of a full domain name; the list is empty if the name does not exist or has no SRV
    /// records. As in musl, all name servers are queried at the same time, and the first answer is used.
    ///
    /// # Errors
    /// The last error, if every name server has failed or has refused the query.
    async fn srv(&self, name: &str) -> io::Result<Vec<SrvRecord>> {
        let mut answers: FuturesUnordered<_> = self.name_servers.iter().map(|&server| self.ask(server, name)).collect();
        let mut answer = Err(io::Error::other("no name server is configured"));
        while answer.is_err()
            && let Some(next) = answers.next().await
        {
            answer = next;
        }
        answer
    }

    async fn ask(&self, server: SocketAddr, name: &str) -> io::Result<Vec<SrvRecord>> {
        let mut failed = io::Error::from(io::ErrorKind::TimedOut);
        for _ in 0..self.attempts {
            let query = DnsQuery::new(name)?;
            let answer = match within(self.timeout, query.over_udp(server)).await {
                Ok(DnsAnswer::CutOff) => within(self.timeout, query.over_tcp(server)).await,
                answer => answer,
            };
            failed = match answer {
                Ok(DnsAnswer::Records(records)) => return Ok(records),
                Ok(DnsAnswer::CutOff) => io::Error::other("the answer is cut off, also over TCP"),
                Err(error) => error,
            };
        }
        Err(io::Error::new(failed.kind(), format!("name server {server}: {failed}")))
    }
}

async fn within<T>(limit: Duration, call: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let late = || io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {} s", limit.as_secs()));
    timeout(limit, call).await.unwrap_or_else(|_| Err(late()))
}

enum DnsAnswer {
    Records(Vec<SrvRecord>),
    /// The name server has truncated its answer, because the records do not fit into one UDP datagram.
    CutOff,
}

/// A DNS question with its encoded message; each query has a new random id and is sent from a new port.
struct DnsQuery {
    number: u16,
    name: Name<'static>,
    message: Vec<u8>,
}

impl DnsQuery {
    fn new(name: &str) -> io::Result<Self> {
        let no_name = || io::Error::new(io::ErrorKind::InvalidInput, format!("{name} is not a DNS name in ASCII"));
        let name = Name::new(name).ok().filter(|_| name.is_ascii()).ok_or_else(no_name)?.into_owned();
        let [high, low, ..] = RandomState::new().build_hasher().finish().to_be_bytes();
        let number = u16::from_be_bytes([high, low]);
        let mut query = Packet::new_query(number);
        query.set_flags(PacketFlag::RECURSION_DESIRED);
        query.questions.push(Question::new(name.clone(), TYPE::SRV.into(), CLASS::IN.into(), false));
        let message = query.build_bytes_vec().map_err(io::Error::other)?;
        Ok(Self { number, name, message })
    }

    async fn over_udp(&self, server: SocketAddr) -> io::Result<DnsAnswer> {
        let any: IpAddr = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((any, 0)).await?;
        // A connected UDP socket receives datagrams only from the name server.
        socket.connect(server).await?;
        socket.send(&self.message).await?;
        let mut message = vec![0; MAX_UDP_BYTES];
        loop {
            let length = socket.recv(&mut message).await?;
            // Skip DNS messages that do not answer the question that was sent, because they may be forged or late.
            if let Some(answer) = self.answer(&message[..length]) {
                return answer;
            }
        }
    }

    async fn over_tcp(&self, server: SocketAddr) -> io::Result<DnsAnswer> {
        let mut stream = TcpStream::connect(server).await?;
        let length = u16::try_from(self.message.len()).map_err(io::Error::other)?;
        stream.write_all(&[&length.to_be_bytes(), &*self.message].concat()).await?;
        let mut message = vec![0; stream.read_u16().await?.into()];
        stream.read_exact(&mut message).await?;
        self.answer(&message).unwrap_or_else(|| Err(io::Error::other("an answer to another question")))
    }

    /// Returns the SRV records in a DNS message; `None` if the message does not answer this query.
    fn answer(&self, message: &[u8]) -> Option<io::Result<DnsAnswer>> {
        let answer = Packet::parse(message).ok()?;
        if answer.id() != self.number || !answer.has_flags(PacketFlag::RESPONSE) {
            return None;
        }
        // A refusal from the name server is accepted even if its message does not repeat the question.
        let answers_this = answer.questions.iter().any(|question| question.qname == self.name);
        match answer.rcode() {
            RCODE::NoError | RCODE::NameError if !answers_this => None,
            _ if answer.has_flags(PacketFlag::TRUNCATION) => Some(Ok(DnsAnswer::CutOff)),
            RCODE::NoError | RCODE::NameError => {
                Some(Ok(DnsAnswer::Records(answer.answers.iter().filter_map(|record| srv(&record.rdata)).collect())))
            }
            refusal => Some(Err(io::Error::other(format!("it answers {refusal:?}")))),
        }
    }
}

fn srv(record: &RData<'_>) -> Option<SrvRecord> {
    let RData::SRV(record) = record else { return None };
    Some(SrvRecord {
        priority: record.priority,
        weight: record.weight,
        port: record.port,
        target: record.target.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use simple_dns::ResourceRecord;
    use simple_dns::rdata::SRV;
    use tokio::net::TcpListener;

    const NAME: &str = "_etcd-client._tcp.example.test";

    fn record(priority: u16, target: &'static str) -> RData<'static> {
        RData::SRV(SRV { priority, weight: 5, port: 2379, target: Name::new_unchecked(target) })
    }

    /// Builds the message with which a name server answers a query.
    fn answer(query: &[u8], change: impl FnOnce(&mut Packet<'_>)) -> Vec<u8> {
        let query = Packet::parse(query).unwrap();
        let mut answer = Packet::new_reply(query.id());
        answer.questions.clone_from(&query.questions);
        change(&mut answer);
        answer.build_bytes_vec_compressed().unwrap()
    }

    fn add(packet: &mut Packet<'_>, record: RData<'static>) {
        packet.answers.push(ResourceRecord::new(Name::new_unchecked(NAME), CLASS::IN, 30, record));
    }

    async fn udp_server() -> (UdpSocket, Resolver) {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let resolver = Resolver::of(socket.local_addr().unwrap());
        (socket, resolver)
    }

    async fn receive(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
        let mut query = vec![0; MAX_UDP_BYTES];
        let (length, client) = socket.recv_from(&mut query).await.unwrap();
        query.truncate(length);
        (query, client)
    }

    #[test]
    fn dns_resolv_conf_gives_name_servers_and_limits() {
        let text = "nameserver 192.0.2.1\nnameserver 2001:db8::1\nwhatever\noptions timeout:3 attempts:9 whatever\n";
        let resolver = Resolver::parse(text);
        let servers: [SocketAddr; 2] = ["192.0.2.1:53".parse().unwrap(), "[2001:db8::1]:53".parse().unwrap()];
        assert_eq!(resolver.name_servers, servers);
        assert_eq!((resolver.timeout, resolver.attempts), (Duration::from_secs(3), 5));
        let resolver = Resolver::parse("");
        assert_eq!(resolver.name_servers, ["127.0.0.1:53".parse::<SocketAddr>().unwrap()]);
        assert_eq!((resolver.timeout, resolver.attempts), (Duration::from_secs(5), 2));
    }

    #[tokio::test]
    async fn dns_answers_to_other_questions_are_ignored() {
        let (socket, resolver) = udp_server().await;
        let (found, ()) = tokio::join!(resolver.srv(NAME), async {
            let (query, client) = receive(&socket).await;
            let forged = |change: &dyn Fn(&mut Packet<'_>)| {
                answer(&query, |reply| {
                    add(reply, record(0, "forged.test"));
                    change(reply);
                })
            };
            let other_question =
                Question::new(Name::new_unchecked("other.test"), TYPE::SRV.into(), CLASS::IN.into(), false);
            for message in [
                forged(&|reply| reply.set_id(reply.id().wrapping_add(1))),
                forged(&|reply| reply.remove_flags(PacketFlag::RESPONSE)),
                forged(&|reply| reply.questions = vec![other_question.clone()]),
                forged(&|reply| reply.questions.clear()),
                b"garbage".to_vec(),
                // An invalid DNS message: its compressed name points to itself.
                [&query[..12], &[0xc0, 12, 0, 33, 0, 1]].concat(),
                Vec::new(),
                answer(&query, |reply| add(reply, record(1, "etcd.test"))),
            ] {
                socket.send_to(&message, client).await.unwrap();
            }
        });
        assert_eq!(found.unwrap(), [SrvRecord { priority: 1, weight: 5, port: 2379, target: "etcd.test".to_owned() }]);
    }

    #[tokio::test]
    async fn dns_answer_comes_over_tcp_when_truncated() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let socket = UdpSocket::bind(address).await.unwrap();
        let resolver = Resolver::of(address);
        let (found, ()) = tokio::join!(resolver.srv(NAME), async {
            let (query, client) = receive(&socket).await;
            let cut_off = answer(&query, |reply| reply.set_flags(PacketFlag::TRUNCATION));
            socket.send_to(&cut_off, client).await.unwrap();
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut query = vec![0; stream.read_u16().await.unwrap().into()];
            stream.read_exact(&mut query).await.unwrap();
            let whole = answer(&query, |reply| (0..40).for_each(|priority| add(reply, record(priority, "etcd.test"))));
            assert!(whole.len() > MAX_UDP_BYTES);
            let length = u16::try_from(whole.len()).unwrap().to_be_bytes();
            stream.write_all(&[&length, &*whole].concat()).await.unwrap();
        });
        assert_eq!(found.unwrap().len(), 40);
    }

    #[tokio::test]
    async fn dns_refusal_is_error_unless_another_server_answers() {
        let (refusing, resolver) = udp_server().await;
        let refuse = async {
            loop {
                let (query, client) = receive(&refusing).await;
                let refusal = answer(&query, |reply| {
                    *reply.rcode_mut() = RCODE::Refused;
                    reply.questions.clear();
                });
                refusing.send_to(&refusal, client).await.unwrap();
            }
        };
        let both = async {
            let error = resolver.srv(NAME).await.unwrap_err().to_string();
            assert!(error.starts_with("name server 127.0.0.1:") && error.ends_with(": it answers Refused"), "{error}");
            let (working, other) = udp_server().await;
            let servers = [resolver.name_servers, other.name_servers].concat();
            let all = Resolver { name_servers: servers, ..Resolver::parse("") };
            let (found, ()) = tokio::join!(all.srv(NAME), async {
                let (query, client) = receive(&working).await;
                working.send_to(&answer(&query, |reply| add(reply, record(0, "."))), client).await.unwrap();
            });
            assert_eq!(found.unwrap()[0].target, "");
        };
        tokio::select! {
            () = refuse => {}
            () = both => {}
        }
    }

    #[tokio::test]
    async fn dns_silence_ends_after_all_attempts() {
        let (socket, resolver) = udp_server().await;
        let resolver = Resolver { timeout: Duration::from_millis(50), ..resolver };
        let error = resolver.srv(NAME).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        let numbers = [receive(&socket).await, receive(&socket).await];
        // The client sends each attempt of a query from a new port.
        assert_ne!(numbers[0].1, numbers[1].1);
    }

    #[tokio::test]
    async fn dns_names_are_refused_when_not_ascii() {
        let (_socket, resolver) = udp_server().await;
        let error = resolver.srv("_etcd-client._tcp.b\u{fc}cher.test").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    }
}
