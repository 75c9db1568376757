//! The names under which a browser may ask.
//!
//! A page of another site can have its own name point at 127.0.0.1. The browser then asks this daemon, and says that name
//! in `Host`. So a name that is not this machine's own is refused.

use std::net::IpAddr;

/// True if `host`, with or without a port, names loopback or is one of `named`.
pub(super) fn is_allowed(host: &str, named: &[String]) -> bool {
    let Some(name) = without_port(host) else { return false };
    let is_loopback = name.eq_ignore_ascii_case("localhost") || name.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
    is_loopback || named.iter().any(|other| other.trim_matches(['[', ']']).eq_ignore_ascii_case(name))
}

/// The name or address of `host`; `None` if it has neither this form nor a port of digits.
fn without_port(host: &str) -> Option<&str> {
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => host.split_at(host.find(':').unwrap_or(host.len())),
    };
    let is_port =
        port.is_empty() || port.strip_prefix(':').is_some_and(|port| port.bytes().all(|b| b.is_ascii_digit()));
    (is_port && !name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_named_hosts_are_allowed_and_no_others() {
        let named = vec!["ipam.lan".to_owned(), "10.1.2.3".to_owned(), "[fd00::1]".to_owned()];
        for host in [
            "localhost",
            "LOCALHOST:8080",
            "127.0.0.1",
            "127.1.2.3:80",
            "[::1]",
            "[::1]:80",
            "ipam.lan",
            "Ipam.Lan:81",
            "10.1.2.3:9",
            "[fd00::1]:9",
        ] {
            assert!(is_allowed(host, &named), "{host}");
        }
        for host in [
            "",
            ":80",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.1.2.4",
            "[::2]",
            "::1",
            "[::1",
            "[::1]x",
            "localhost:80x",
            "localhost@evil.example",
            "evil.example#localhost",
            "0.0.0.0",
        ] {
            assert!(!is_allowed(host, &named), "{host}");
        }
    }
}
