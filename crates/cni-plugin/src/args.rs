//! `CNI_ARGS`: pairs `KEY=value` between semicolons.

use std::net::IpAddr;

use agent::{CniError, Result};

use crate::gojson::{quoted, quoted_list};

/// The keys that Calico's plugin knows when it reads the text for the first time.
const KUBERNETES_KEYS: [&str; 5] =
    ["IgnoreUnknown", "IP", "K8S_POD_NAME", "K8S_POD_NAMESPACE", "K8S_POD_INFRA_CONTAINER_ID"];

/// The keys that it knows when ADD reads the text again.
const ADDRESS_KEYS: [&str; 2] = ["IgnoreUnknown", "IP"];

/// How an address may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddressForm {
    /// An address alone.
    Bare,
    /// An address, or one with a prefix length, which is ignored.
    BareOrCidr,
}

/// The values in `CNI_ARGS`; an absent one is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Args {
    pub(crate) ip: Option<IpAddr>,
    pub(crate) pod: String,
    pub(crate) pod_namespace: String,
    /// `CNI_TEST_NAMESPACE`, which Calico's own tests set.
    pub(crate) test_namespace: String,
    /// `MARGAY_STICKY`: the name under which the workload keeps its addresses. It needs `IgnoreUnknown=1` beside it, as
    /// CNI's library knows it no more than Calico does.
    pub(crate) sticky: String,
}

impl Args {
    /// Reads the text. Keys that nobody knows are an error unless `IgnoreUnknown` is true, wherever it stands.
    ///
    /// # Errors
    /// Code 999, with the texts of Go's CNI library.
    pub(crate) fn parse(text: &str, form: AddressForm) -> Result<Self> {
        load(text, &KUBERNETES_KEYS, form)
    }

    /// Refuses what the second reading of Calico's ADD refuses: without `IgnoreUnknown` the Kubernetes keys count as
    /// unknown then.
    ///
    /// # Errors
    /// Code 999.
    pub(crate) fn check_again(text: &str) -> Result<()> {
        load(text, &ADDRESS_KEYS, AddressForm::Bare).map(|_| ())
    }
}

fn load(text: &str, known: &[&str], form: AddressForm) -> Result<Args> {
    let mut args = Args::default();
    if text.is_empty() {
        return Ok(args);
    }
    let mut ignore_unknown = false;
    let mut unknown = Vec::new();
    for pair in text.split(';') {
        let (key, value) = split(pair)?;
        if key == "CNI_TEST_NAMESPACE" {
            value.clone_into(&mut args.test_namespace);
        }
        if key == "MARGAY_STICKY" {
            value.clone_into(&mut args.sticky);
        }
        if !known.contains(&key) {
            unknown.push(pair);
            continue;
        }
        let wrong =
            |reason| CniError::internal(format!("ARGS: error parsing value of pair {}: {reason}", quoted(pair)));
        match key {
            "IgnoreUnknown" => ignore_unknown = parse_bool(value).map_err(wrong)?,
            "IP" if value.is_empty() => args.ip = None,
            "IP" => args.ip = Some(parse_address(value, form).map_err(wrong)?),
            "K8S_POD_NAME" => value.clone_into(&mut args.pod),
            "K8S_POD_NAMESPACE" => value.clone_into(&mut args.pod_namespace),
            _ => {}
        }
    }
    if unknown.is_empty() || ignore_unknown {
        Ok(args)
    } else {
        Err(CniError::internal(format!("ARGS: unknown args {}", quoted_list(unknown))))
    }
}

/// The two halves of a pair with exactly one `=` in it.
fn split(pair: &str) -> Result<(&str, &str)> {
    pair.split_once('=')
        .filter(|(_, value)| !value.contains('='))
        .ok_or_else(|| CniError::internal(format!("ARGS: invalid pair {}", quoted(pair))))
}

fn parse_bool(value: &str) -> Result<bool, String> {
    match value.to_lowercase().as_str() {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        other => Err(format!("boolean unmarshal error: invalid input {other}")),
    }
}

/// Reads an address; an IPv4 address in IPv6 clothes (`::ffff:a.b.c.d`) is the IPv4 address, as for Go.
///
/// # Errors
/// Go's text for what is no address.
pub(crate) fn parse_address(text: &str, form: AddressForm) -> Result<IpAddr, String> {
    let bare = text.parse::<IpAddr>().ok();
    let found = match form {
        AddressForm::Bare => bare,
        AddressForm::BareOrCidr => bare.or_else(|| text.parse::<ipnet::IpNet>().ok().map(|net| net.addr())),
    };
    found.map(|address| address.to_canonical()).ok_or_else(|| format!("invalid IP address: {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        let error = Args::parse(text, AddressForm::Bare).unwrap_err();
        assert_eq!(error.code().number(), 999);
        error.message().to_owned()
    }

    #[test]
    fn what_is_read() {
        let text = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart;K8S_POD_INFRA_CONTAINER_ID=x;K8S_POD_UID=u;IP=10.0.0.1";
        let args = Args::parse(text, AddressForm::Bare).unwrap();
        let expected = Args {
            ip: Some("10.0.0.1".parse().unwrap()),
            pod: "cart".into(),
            pod_namespace: "shop".into(),
            ..Args::default()
        };
        assert_eq!(args, expected);
        assert_eq!(Args::parse("", AddressForm::Bare).unwrap(), Args::default());
        assert_eq!(Args::parse("IP=1.2.3.4;IP=", AddressForm::Bare).unwrap(), Args::default());
        let mapped = Args::parse("IP=::ffff:10.0.0.1", AddressForm::Bare).unwrap();
        assert_eq!(mapped.ip, args.ip);
        let test = Args::parse("CNI_TEST_NAMESPACE=t;IgnoreUnknown=true", AddressForm::Bare).unwrap();
        assert_eq!(test.test_namespace, "t");
    }

    #[test]
    fn what_is_refused() {
        assert_eq!(error("FOO"), "ARGS: invalid pair \"FOO\"");
        assert_eq!(error("A=b=c"), "ARGS: invalid pair \"A=b=c\"");
        assert_eq!(error(";"), "ARGS: invalid pair \"\"");
        assert_eq!(error("IP=1.2.3.4;"), "ARGS: invalid pair \"\"");
        assert_eq!(error("FOO=a;ip=1;IgnoreUnknown=0"), "ARGS: unknown args [\"FOO=a\" \"ip=1\"]");
        assert_eq!(
            error("IgnoreUnknown=Yes"),
            "ARGS: error parsing value of pair \"IgnoreUnknown=Yes\": boolean unmarshal error: invalid input yes"
        );
        for address in ["foo", "10.0.0.1/24", "010.0.0.1", "1.2.3", "fe80::1%eth0", " 10.0.0.1"] {
            assert_eq!(
                error(&format!("IP={address}")),
                format!("ARGS: error parsing value of pair \"IP={address}\": invalid IP address: {address}")
            );
        }
    }

    #[test]
    fn ignore_unknown_may_stand_anywhere() {
        for text in ["IgnoreUnknown=1;FOO=a", "FOO=a;IgnoreUnknown=TRUE"] {
            Args::parse(text, AddressForm::Bare).unwrap();
            Args::check_again(text).unwrap();
        }
    }

    #[test]
    fn the_second_reading_does_not_know_kubernetes() {
        let text = "K8S_POD_NAME=a";
        Args::parse(text, AddressForm::Bare).unwrap();
        assert_eq!(Args::check_again(text).unwrap_err().message(), "ARGS: unknown args [\"K8S_POD_NAME=a\"]");
    }

    #[test]
    fn a_prefix_length_is_left_aside_where_it_may_stand() {
        let args = Args::parse("IP=10.0.0.7/24", AddressForm::BareOrCidr).unwrap();
        assert_eq!(args.ip, Some("10.0.0.7".parse().unwrap()));
        assert!(Args::parse("IP=10.0.0.7/33", AddressForm::BareOrCidr).is_err());
    }
}
