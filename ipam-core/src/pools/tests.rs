//! The choice of pools and blocks.

use std::collections::HashSet;

use time::macros::datetime;

use super::*;
use crate::model::NewPool;

fn make(new: NewPool) -> Pool {
    Pool::new(&new, "u", datetime!(2026-01-01 0:00 UTC)).unwrap()
}

fn new(name: &str, cidr: &str) -> NewPool {
    NewPool::new(name, net(cidr))
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn pools() -> Vec<Pool> {
    let mut off = make(new("off", "10.9.0.0/16"));
    off.disable();
    vec![
        make(new("a", "10.1.0.0/16").with_node_selector("zone == 'a'")),
        make(new("hand", "10.2.0.0/16").with_assignment_mode(AssignmentMode::Manual)),
        make(new("main", "10.3.0.0/16")),
        off,
        make(new("six", "fd80::/64")),
        make(new("team", "10.4.0.0/16").with_namespace_selector("team == 'x'")),
        make(new("tunnels", "10.5.0.0/16").with_allowed_uses([PoolUse::Tunnel])),
    ]
}

fn names<'a>(
    pools: &'a [Pool],
    requested: &[&str],
    node: &[(&str, &str)],
    change: impl FnOnce(&mut PoolQuery<'_>),
) -> Result<Vec<&'a str>, String> {
    let labels = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect::<Labels>();
    let (node_labels, namespace_labels) = (labels(node), Labels::new());
    let requested: Vec<IpNet> = requested.iter().map(|text| net(text)).collect();
    let mut query = PoolQuery {
        family: Family::V4,
        requested: &requested,
        node: "node1",
        node_labels: &node_labels,
        namespace_labels: &namespace_labels,
        wanted: PoolUse::Workload,
        host_reserved: None,
    };
    change(&mut query);
    let chosen = select_pools(pools, &query).map_err(|error| error.to_string())?;
    Ok(chosen.into_iter().map(Pool::name).collect())
}

#[test]
fn selectors_choose() {
    let pools = pools();
    let team = Labels::from([("team".into(), "x".into())]);
    assert_eq!(names(&pools, &[], &[], |_| ()), Ok(vec!["main"]));
    assert_eq!(names(&pools, &[], &[("zone", "a")], |_| ()), Ok(vec!["a", "main"]));
    assert_eq!(names(&pools, &[], &[], |query| query.family = Family::V6), Ok(vec!["six"]));
    assert_eq!(names(&pools, &[], &[], |query| query.wanted = PoolUse::Tunnel), Ok(vec!["main", "tunnels"]));
    let (zone, requested) = (Labels::new(), []);
    let query = PoolQuery {
        family: Family::V4,
        requested: &requested,
        node: "n",
        node_labels: &zone,
        namespace_labels: &team,
        wanted: PoolUse::Workload,
        host_reserved: None,
    };
    assert_eq!(select_pools(&pools, &query).unwrap().len(), 2);
}

#[test]
fn requests_ignore_selectors_and_modes() {
    let pools = pools();
    let requested = ["10.2.0.0/16", "10.1.0.0/16", "10.2.0.0/16"];
    assert_eq!(names(&pools, &requested, &[], |_| ()), Ok(vec!["hand", "a"]));
    let error = |requested: &[&str]| names(&pools, requested, &[], |_| ()).unwrap_err();
    assert_eq!(error(&["10.9.0.0/16"]), "the given pool (10.9.0.0/16) does not exist, or is not enabled");
    assert_eq!(error(&["10.3.0.0/24"]), "the given pool (10.3.0.0/24) does not exist, or is not enabled");
    // As in Calico, the error that there is no pool at all comes first.
    let only_off = &pools[3..4];
    assert_eq!(names(only_off, &["10.9.0.0/16"], &[], |_| ()).unwrap_err(), "cannot find a qualified ippool");
    assert_eq!(error(&["10.5.0.0/16"]), "cannot find a qualified ippool, no pools match the required use (Workload)");
}

#[test]
fn nothing_left_says_why() {
    let pools = pools();
    let kept = |start| HostReserved { start, end: 0, ..HostReserved::default() };
    assert_eq!(names(&pools[3..4], &[], &[], |_| ()).unwrap_err(), "cannot find a qualified ippool");
    assert_eq!(names(&pools[..2], &[], &[], |_| ()).unwrap_err(), "no configured Calico pools for node node1");
    let (fits, too_many) = (kept(63), kept(64));
    let mut query = PoolQuery {
        family: Family::V4,
        requested: &[],
        node: "n",
        node_labels: &Labels::new(),
        namespace_labels: &Labels::new(),
        wanted: PoolUse::Workload,
        host_reserved: Some(&fits),
    };
    assert!(select_pools(&pools, &query).is_ok());
    query.host_reserved = Some(&too_many);
    assert_eq!(select_pools(&pools, &query).unwrap_err(), PoolError::NoneQualified);
    let bad = [make(new("bad", "10.0.0.0/16").with_node_selector("a =="))];
    assert!(names(&bad, &[], &[], |_| ()).unwrap_err().starts_with("pool bad: invalid selector: "));
}

#[test]
fn requested_names_and_networks() {
    let pools = pools();
    let parse = |text, family| parse_requested(text, &pools, family).map_err(|error| error.to_string());
    assert_eq!(parse("hand", Family::V4), Ok(net("10.2.0.0/16")));
    assert_eq!(parse("10.2.3.4/16", Family::V4), Ok(net("10.2.0.0/16")));
    assert_eq!(parse("10.99.0.0/16", Family::V4), Ok(net("10.99.0.0/16")));
    assert_eq!(
        parse("nopool", Family::V4),
        Err("error parsing pool \"nopool\": invalid CIDR address: nopool".to_owned())
    );
    assert_eq!(parse("fd80::/64", Family::V4), Err("\"fd80::\" isn't a IPv4 address".to_owned()));
    assert_eq!(parse("main", Family::V6), Err("\"10.3.0.0\" isn't a IPv6 address".to_owned()));
}

#[test]
fn wanted_addresses_have_a_pool() {
    let pools = pools();
    let of = |ip: &str| {
        pool_of(&pools, ip.parse().unwrap(), PoolUse::Workload).map(Pool::name).map_err(|error| error.to_string())
    };
    assert_eq!(of("10.2.0.9"), Ok("hand"));
    assert_eq!(of("10.9.0.9"), Err("The provided IP address is not in a configured pool\n".to_owned()));
    assert_eq!(
        of("10.5.0.6"),
        Err("IP address 10.5.0.6 is in IP pool \"tunnels\", which is not allowed for use \"Workload\" (allowedUses: \
             [Tunnel])"
            .to_owned())
    );
    assert_eq!(block_of(&pools[2], "10.3.1.70".parse().unwrap()), Some(net("10.3.1.64/26")));
    assert_eq!(block_of(&pools[2], "10.4.1.70".parse().unwrap()), None);
    assert_eq!(block_of(&pools[4], "fd80::ffff".parse().unwrap()), Some(net("fd80::ffc0/122")));
}

#[test]
fn every_block_comes_once_from_the_hosts_start() {
    // Known values of 32-bit FNV-1.
    assert_eq!(start_of(""), 0x811c_9dc5);
    assert_eq!(start_of("a"), 0x050c_5d7e);
    assert_eq!(start_of("foobar"), 0x31f0_b262);
    let pool = make(new("p", "10.0.0.0/24").with_block_size(28));
    let blocks: Vec<IpNet> = blocks_from(&pool, 16 + 14).collect();
    assert_eq!(blocks.len(), 16);
    assert_eq!(blocks[..4], [net("10.0.0.224/28"), net("10.0.0.240/28"), net("10.0.0.0/28"), net("10.0.0.16/28")]);
    assert_eq!(blocks.iter().collect::<HashSet<_>>().len(), 16);
    assert!(blocks.iter().all(|block| pool.cidr().contains(block)));
}

#[test]
fn large_and_odd_pools_do_not_overflow() {
    let six = make(new("p", "::/0").with_block_size(128));
    assert_eq!(blocks_from(&six, 5).take(2).collect::<Vec<_>>(), [net("::5/128"), net("::6/128")]);
    let last = make(new("p", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ff00/120").with_block_size(122));
    assert_eq!(blocks_from(&last, 3).count(), 4);
    let four = make(new("p", "255.255.255.0/24").with_block_size(32));
    assert_eq!(blocks_from(&four, 255).count(), 256);
    let one = make(new("p", "10.0.0.0/26"));
    assert_eq!(blocks_from(&one, u64::MAX).collect::<Vec<_>>(), [net("10.0.0.0/26")]);
    // Blocks larger than the pool, or longer than an address: only a foreign program writes these.
    for block_size in [20, 33, 255] {
        let odd = make(new("p", "10.0.0.0/26").with_block_size(block_size));
        assert_eq!(blocks_from(&odd, 7).count(), 0);
        assert_eq!(block_of(&odd, "10.0.0.1".parse().unwrap()), None);
        assert!(names(&[odd], &[], &[], |_| ()).is_err());
    }
}

/// All blocks of [`Blocks::next_unreserved`].
fn unreserved(mut blocks: Blocks, reservations: &Reservations) -> Vec<IpNet> {
    std::iter::from_fn(|| blocks.next_unreserved(reservations)).collect()
}

#[test]
fn reserved_blocks_are_passed_over_one_and_all() {
    let pool = make(new("p", "10.0.1.0/24").with_block_size(28));
    let sets: [&[&str]; 8] = [
        &[],
        &["10.0.1.0/25"],
        &["10.0.1.128/25"],
        &["10.0.0.0/16"],
        &["10.0.1.0/27", "10.0.1.64/28", "10.0.1.96/32"],
        &["10.0.1.16/28", "10.0.1.32/27", "10.0.1.64/29", "10.0.1.240/28"],
        &["10.0.0.0/24", "10.0.1.0/28", "10.0.1.224/27", "10.0.2.0/24"],
        &["10.0.1.8/29", "10.0.1.16/29"],
    ];
    for nets in sets {
        let reservations = Reservations::new(nets.iter().map(|text| net(text)));
        for start in 0..16 {
            let expected: Vec<_> = blocks_from(&pool, start).filter(|block| !reservations.covers(*block)).collect();
            assert_eq!(unreserved(blocks_from(&pool, start), &reservations), expected, "{nets:?} from {start}");
        }
    }
}

#[test]
fn a_few_addresses_of_a_huge_network_are_found_at_once() {
    // All but fd06::10 to fd06::17.
    let around = ["fd06::/124", "fd06::18/125", "fd06::20/123"].map(net);
    let rest = (0..58_u8)
        .map(|bit| IpNet::new(IpAddr::V6(((0xfd06_u128 << 112) | (1 << (6 + bit))).into()), 122 - bit).unwrap());
    let reservations = Reservations::new(around.into_iter().chain(rest));
    let pool = make(new("p", "fd06::/64").with_block_size(122));
    for start in [0, 1, u64::MAX] {
        assert_eq!(unreserved(blocks_from(&pool, start), &reservations), [net("fd06::/122")]);
    }
    let all = Reservations::new([net("::/0")]);
    let six = make(new("p", "::/0").with_block_size(128));
    assert_eq!(unreserved(blocks_from(&six, 5), &all), []);
}

#[test]
fn the_namespace_is_asked_for_only_where_it_matters() {
    let (none, zone) = (Labels::new(), Labels::from([("zone".into(), "a".into())]));
    let requested = [net("10.4.0.0/16")];
    let asks = |all: &[Pool], change: &dyn Fn(&mut PoolQuery<'_>)| {
        let mut query = PoolQuery {
            family: Family::V4,
            requested: &[],
            node: "n",
            node_labels: &none,
            namespace_labels: &none,
            wanted: PoolUse::Workload,
            host_reserved: None,
        };
        query.node_labels = &zone;
        change(&mut query);
        asks_for_namespace(all, &query)
    };
    assert!(asks(&pools(), &|_| ()));
    assert!(!asks(&pools(), &|query| query.family = Family::V6));
    let without: Vec<Pool> = pools().into_iter().filter(|pool| pool.name() != "team").collect();
    assert!(!asks(&without, &|_| ()));
    let team = || new("team", "10.4.0.0/16").with_namespace_selector("team == 'x'");
    for other in [
        team().with_node_selector("zone == 'b'"),
        team().with_assignment_mode(AssignmentMode::Manual),
        team().with_allowed_uses([PoolUse::Tunnel]),
    ] {
        assert!(!asks(&[make(other)], &|_| ()));
    }
    let named = PoolQuery {
        family: Family::V4,
        requested: &requested,
        node: "n",
        node_labels: &none,
        namespace_labels: &none,
        wanted: PoolUse::Workload,
        host_reserved: None,
    };
    assert!(!asks_for_namespace(&pools(), &named), "a pool that is named is taken whatever its selectors say");
}
