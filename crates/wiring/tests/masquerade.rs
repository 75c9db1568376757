//! Tests masquerading with real packets between containers of two pools on a host, and another machine ("the world")
//! without routes to the pools.
//!
//! Each test runs on its own host: a thread in a new network namespace. Each container, and the machine outside ("the
//! world"), has its own network namespace. A sleeping process keeps each network namespace of the test alive.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use libtest_mimic::{Arguments, Failed, Trial};
use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST};
use netlink_sys::Socket;
use netlink_sys::protocols::NETLINK_NETFILTER;
use nix::sched::{CloneFlags, setns};
use support::{Netns, on_a_host, shell};
use wiring::{Device, Forwarding, NextHop, OldInterface, Plan, connect, ensure_forwarding, masquerade};

/// Test addresses of one address family: a host and the world on one link, a pool with two containers, and a pool with
/// one container.
struct Family {
    host: &'static str,
    world: &'static str,
    length: u8,
    pools: [&'static str; 2],
    pods: [&'static str; 3],
}

const IPV4: Family = Family {
    host: "192.0.2.1",
    world: "192.0.2.2",
    length: 24,
    pools: ["10.65.0.0/16", "10.66.0.0/24"],
    pods: ["10.65.0.1", "10.65.255.2", "10.66.0.1"],
};
const IPV6: Family = Family {
    host: "2001:db8::1",
    world: "2001:db8::2",
    length: 64,
    pools: ["fd80::/64", "fd81:0:0:0:8000::/65"],
    pods: ["fd80::1", "fd80::ffff:2", "fd81::8000:0:0:1"],
};
/// The environment variable that is set for the process without privileges.
const POWERLESS: &str = "MARGAY_TEST_POWERLESS";
/// The name of the store whose rules are tested.
const STORE: &str = "lab";
/// Number of threads that call the masquerade functions at the same time.
const CALLERS: usize = 16;
/// How long to wait for a packet to arrive.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    if std::env::var_os(POWERLESS).is_some() {
        return try_without_power();
    }
    let arguments = Arguments::from_args();
    let root = nix::unistd::geteuid().is_root();
    let test = |name: &str, test: fn()| {
        let trial = Trial::test(name, move || on_a_host(test).map_err(Failed::from));
        if root { trial } else { trial.with_kind("networks of their own need root").with_ignored_flag(true) }
    };
    let tests = vec![
        test("world_sees_host_instead_of_pod/ipv4", || world_sees_host_instead_of_pod(&IPV4)),
        test("world_sees_host_instead_of_pod/ipv6", || world_sees_host_instead_of_pod(&IPV6)),
        test("pools_see_each_other_unmasked/ipv4", || pools_see_each_other_unmasked(&IPV4)),
        test("pools_see_each_other_unmasked/ipv6", || pools_see_each_other_unmasked(&IPV6)),
        test("rules_stay_when_set_again", rules_stay_when_set_again),
        test("rules_follow_pools", rules_follow_pools),
        test("rules_stay_whole_when_many_set_at_once", rules_stay_whole_when_many_set_at_once),
        test("rules_are_none_when_nothing_to_masquerade", rules_are_none_when_nothing_to_masquerade),
        test("rules_leave_other_tables", rules_leave_other_tables),
        test("rules_are_apart_for_each_store", rules_are_apart_for_each_store),
        test("rules_error_says_so_without_privilege", rules_error_says_so_without_privilege),
    ];
    libtest_mimic::run(&arguments, tests).exit_code()
}

struct Place {
    world: Netns,
    pods: Vec<Netns>,
}

impl Place {
    /// Creates an outside machine ("the world") and containers, all connected to the network namespace of this thread,
    /// which acts as the host.
    fn new(family: &'static Family) -> Self {
        let Family { host, world: there, length, .. } = family;
        let world = Netns::new();
        let settings = "echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad
            for name in all default; do echo 0 >/proc/sys/net/ipv4/conf/$name/rp_filter; done";
        shell(settings);
        world.inside(|| shell(settings));
        let id = world.0.id();
        shell(&format!(
            "ip link add up0 type veth peer name eth0 netns {id}
            ip link set up0 up
            ip address add {host}/{length} dev up0"
        ));
        world.inside(|| shell(&format!("ip link set eth0 up && ip address add {there}/{length} dev eth0")));
        let pods = family.pods.iter().enumerate().map(|(number, address)| {
            let (pod, address) = (Netns::new(), ip(address));
            let plan = Plan {
                host_interface: format!("calic{number}"),
                old_interface: OldInterface::Removed,
                interface: "eth0".to_owned(),
                mtu: 0,
                queues: 1,
                device: Device::Veth,
                mac: None,
                addresses: vec![address],
                prefixes: Vec::new(),
                routes: nets(&["0.0.0.0/0", "::/0"]),
                forwarding: Forwarding::Off,
                next_hop: NextHop::Known,
            };
            connect(&pod.path(), &plan, Instant::now() + Duration::from_secs(20)).unwrap();
            ensure_forwarding(&[address]).unwrap();
            pod
        });
        Self { pods: pods.collect(), world }
    }
}

/// The result of sending a packet from one network namespace to another, and waiting for the answer.
#[derive(Debug, PartialEq, Eq)]
struct Talk {
    /// The source address that the receiver of the packet saw.
    from: IpAddr,
    answered: bool,
}

fn talk(from: &Netns, to: &Netns, target: &str) -> Talk {
    let target = ip(target);
    // Bind to port 0, so that the kernel chooses a port. A fixed port could still be in use, because a child process
    // forked by another test may have inherited the socket that was bound to it.
    let server = to.inside(|| UdpSocket::bind(SocketAddr::new(target, 0)).unwrap());
    let port = server.local_addr().unwrap().port();
    let any = if target.is_ipv4() { "0.0.0.0" } else { "::" };
    let client = from.inside(|| UdpSocket::bind(SocketAddr::new(ip(any), 0)).unwrap());
    server.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    // `send_to` fails if there is no route for the answer, so every answer that was sent will arrive.
    client.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    client.send_to(b"there", (target, port)).unwrap();
    let mut buffer = [0; 16];
    let (_, seen) = server.recv_from(&mut buffer).unwrap_or_else(|error| panic!("nothing came to {target}: {error}"));
    let answered = match server.send_to(b"back", seen) {
        Ok(_) => client.recv(&mut buffer).is_ok(),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::NetworkUnreachable, "{error}");
            false
        }
    };
    Talk { from: seen.ip(), answered }
}

fn world_sees_host_instead_of_pod(family: &'static Family) {
    let place = Place::new(family);
    let to_world = |pod: usize| talk(&place.pods[pod], &place.world, family.world);
    let itself = |pod: usize| Talk { from: ip(family.pods[pod]), answered: false };
    assert_eq!([to_world(0), to_world(2)], [itself(0), itself(2)], "without rules");
    let pools = nets(&family.pools);
    masquerade::ensure(STORE, &pools[..1], &pools).unwrap();
    let host = || Talk { from: ip(family.host), answered: true };
    assert_eq!([to_world(0), to_world(1), to_world(2)], [host(), host(), itself(2)], "with rules for the first pool");
    masquerade::ensure(STORE, &pools, &pools).unwrap();
    assert_eq!([to_world(0), to_world(2)], [host(), host()], "with rules for both pools");
    masquerade::ensure(STORE, &[], &[]).unwrap();
    assert_eq!([to_world(0), to_world(2)], [itself(0), itself(2)], "after the rules");
}

fn pools_see_each_other_unmasked(family: &'static Family) {
    let place = Place::new(family);
    let pools = nets(&family.pools);
    for masqueraded in [&pools[..], &pools[..1], &[]] {
        masquerade::ensure(STORE, masqueraded, &pools).unwrap();
        for (from, to) in [(0, 1), (1, 0), (0, 2), (2, 0)] {
            let talk = talk(&place.pods[from], &place.pods[to], family.pods[to]);
            assert_eq!(talk, Talk { from: ip(family.pods[from]), answered: true }, "{from} {to} {masqueraded:?}");
        }
    }
    // A network that is not in `pools` is a destination outside all pools.
    masquerade::ensure(STORE, &pools[..1], &[]).unwrap();
    assert_ne!(talk(&place.pods[0], &place.pods[2], family.pods[2]).from, ip(family.pods[0]));
}

fn rules_stay_when_set_again() {
    let pools = nets(&["10.65.0.0/16", "10.66.0.0/24", "fd80::/64", "10.64.0.1/32", "0.0.0.0/0"]);
    masquerade::ensure(STORE, &pools[1..], &pools).unwrap();
    let (before, generation) = (listed(), generation());
    // At this point, nftables has one table with one chain per family: 4 exempting and 3 masquerading rules for IPv4, 1
    // and 1 for IPv6.
    assert_eq!(before.len(), 2 + 2 + 7 + 2);
    let backwards: Vec<IpNet> = pools.iter().rev().copied().collect();
    masquerade::ensure(STORE, &pools[1..], &pools).unwrap();
    masquerade::ensure(STORE, &backwards[..4], &backwards).unwrap();
    masquerade::refresh(STORE, &backwards[..4], &backwards).unwrap();
    assert_eq!((listed(), self::generation()), (before, generation));
}

fn rules_follow_pools() {
    let pools = nets(&["10.65.0.0/16", "10.66.0.0/24", "fd80::/64"]);
    let made = |masqueraded: &[IpNet], pools: &[IpNet]| {
        masquerade::ensure(STORE, masqueraded, pools).unwrap();
        listed().len()
    };
    let changes = [(&pools[..], 2 + 2 + 4 + 2), (&pools[..2], 1 + 1 + 4), (&pools[2..], 1 + 1 + 2), (&pools[..0], 0)];
    for (masqueraded, count) in changes {
        assert_eq!(made(masqueraded, masqueraded), count, "{masqueraded:?}");
    }
    masquerade::refresh(STORE, &pools, &pools).unwrap();
    assert_eq!(listed().len(), 0, "no container has come since");
    assert_eq!(made(&pools[..1], &pools), 1 + 1 + 3);
    masquerade::refresh(STORE, &pools[..1], &pools[..1]).unwrap();
    assert_eq!(listed().len(), 1 + 1 + 2);
    // `ensure` must restore the store's masquerading rules after another program has removed all nftables rules.
    let before = listed().len();
    masquerade::ensure(STORE, &[], &[]).unwrap();
    assert_eq!(made(&pools[..1], &pools[..1]), before);
}

fn rules_stay_whole_when_many_set_at_once() {
    let pools = nets(&["10.65.0.0/16", "10.66.0.0/24", "fd80::/64"]);
    let host = File::open("/proc/thread-self/ns/net").unwrap();
    let all = |work: &(dyn Fn(usize) + Sync)| {
        thread::scope(|scope| {
            for caller in 0..CALLERS {
                let host = &host;
                scope.spawn(move || {
                    setns(host, CloneFlags::CLONE_NEWNET).unwrap();
                    work(caller);
                });
            }
        });
    };
    for _ in 0..20 {
        all(&|_| masquerade::ensure(STORE, &pools, &pools).unwrap());
        assert_eq!(listed().len(), 2 + 2 + 4 + 2);
        // If concurrent callers pass different pools, the rules match the pools of exactly one caller.
        all(&|caller| masquerade::ensure(STORE, &pools[caller % 2..], &pools[caller % 2..]).unwrap());
        assert!([2 + 2 + 4 + 2, 2 + 2 + 2 + 2].contains(&listed().len()), "{}", listed().len());
        all(&|_| masquerade::ensure(STORE, &[], &[]).unwrap());
        assert_eq!(listed().len(), 0);
    }
}

fn rules_are_none_when_nothing_to_masquerade() {
    masquerade::ensure(STORE, &[], &[]).unwrap();
    masquerade::ensure(STORE, &[], &nets(&["10.65.0.0/16", "fd80::/64"])).unwrap();
    masquerade::refresh(STORE, &nets(&["10.65.0.0/16"]), &nets(&["10.65.0.0/16"])).unwrap();
    assert_eq!(listed().len(), 0);
}

/// Checks that the rules of iptables remain. iptables may also use nftables, in separate tables.
fn rules_leave_other_tables() {
    shell("iptables-nft -t nat -A POSTROUTING -s 10.99.0.0/16 -j MASQUERADE");
    let before = listed();
    assert!(!before.is_empty());
    let pools = nets(&["10.65.0.0/16"]);
    masquerade::ensure(STORE, &pools, &pools).unwrap();
    assert_eq!(listed().len(), before.len() + 1 + 1 + 2);
    masquerade::ensure(STORE, &[], &[]).unwrap();
    assert_eq!(listed(), before);
}

fn rules_are_apart_for_each_store() {
    let (first, second) = (nets(&["10.65.0.0/16"]), nets(&["10.66.0.0/24"]));
    // A store name with a character that nft cannot read in a table name.
    let other = r"var-lib-other\x2dlab.sled";
    masquerade::ensure(STORE, &first, &first).unwrap();
    let before = listed();
    masquerade::ensure(other, &second, &second).unwrap();
    assert_eq!(listed().len(), 2 * (1 + 1 + 2));
    let named = b"margay-var-lib-other_x2dlab.sled\0";
    assert!(listed().iter().any(|found| found.windows(named.len()).any(|part| part == named)));
    // Turn off masquerading for the second store's pool, which removes the second store's rules.
    masquerade::refresh(other, &[], &second).unwrap();
    assert_eq!(listed(), before);
    masquerade::ensure(other, &[], &second).unwrap();
    assert_eq!(listed(), before);
}

/// Runs this test binary again, in a process without `CAP_NET_ADMIN`.
fn rules_error_says_so_without_privilege() {
    let mut process = Command::new("setpriv");
    process.args(["--inh-caps", "-net_admin", "--bounding-set", "-net_admin"]);
    let done = process.arg(std::env::current_exe().unwrap()).env(POWERLESS, "1").output().unwrap();
    let expected = "failed to read the rules of nftables: operation not permitted; it takes root, or CAP_NET_ADMIN in the \
                    host's network namespace";
    assert_eq!(String::from_utf8_lossy(&done.stderr).trim(), expected);
    assert_eq!(done.status.code(), Some(1));
}

/// The part of the test that runs in the process without `CAP_NET_ADMIN`. Without `CAP_NET_ADMIN`, a call of `ensure`
/// fails only if at least one pool is to be masqueraded.
fn try_without_power() -> ExitCode {
    let pools = nets(&["10.65.0.0/16"]);
    masquerade::ensure(STORE, &[], &pools).unwrap();
    match masquerade::ensure(STORE, &pools, &pools) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            std::io::stderr().write_all(error.to_string().as_bytes()).unwrap();
            ExitCode::FAILURE
        }
    }
}

/// Lists all nftables tables, chains and rules of this thread's network namespace, in the kernel's encoding.
fn listed() -> Vec<Vec<u8>> {
    // The numbers 1, 4 and 7 are the message types NFT_MSG_GETTABLE, NFT_MSG_GETCHAIN and NFT_MSG_GETRULE.
    [1, 4, 7].into_iter().flat_map(|kind| ask(kind, NLM_F_DUMP)).collect()
}

/// Returns the kernel's generation number of the nftables rules, which changes with every change of the rules.
fn generation() -> Vec<u8> {
    // The number 16 is the message type NFT_MSG_GETGEN. The kernel's answer to NFT_MSG_GETGEN also contains the name of
    // the calling process.
    ask(16, 0).pop().unwrap()
}

/// Sends a request to nftables, and returns all messages of the answer.
fn ask(kind: u8, flags: u16) -> Vec<Vec<u8>> {
    let socket = Socket::new(NETLINK_NETFILTER).unwrap();
    let mut request = Vec::new();
    request.extend(20_u32.to_ne_bytes());
    request.extend((0x0a00 | u16::from(kind)).to_ne_bytes());
    request.extend((flags | NLM_F_REQUEST).to_ne_bytes());
    request.extend([0; 12]);
    socket.send(&request, 0).unwrap();
    let mut messages = Vec::new();
    loop {
        let (received, _) = socket.recv_from_full().unwrap();
        let mut rest = received.as_slice();
        while !rest.is_empty() {
            let length = u32::from_ne_bytes(rest[..4].try_into().unwrap()) as usize;
            let kind = u16::from_ne_bytes(rest[4..6].try_into().unwrap());
            assert_ne!(kind, 2, "nftables refuses: {:?}", &rest[16..20]);
            if kind == 3 {
                return messages;
            }
            // Keep only the family of the nftables header: the header also contains the generation number, which every
            // change of the rules increases.
            messages.push([&rest[16..17], &rest[20..length]].concat());
            rest = &rest[length.next_multiple_of(4).min(rest.len())..];
        }
        if flags == 0 {
            return messages;
        }
    }
}

#[track_caller]
fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}
