//! Reads the environment of a plugin call: the `CNI_*` variables and the `KEY=value` pairs of `CNI_ARGS`. Checks that
//! the container's network namespace is not the plugin's own.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::net::IpAddr;
use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};

use agent::{CniError, Code, Result};

use crate::gojson::{quoted, quoted_list};

/// Maximum length of an interface's name on Linux, in bytes.
const MAX_INTERFACE_NAME: usize = 15;

/// A copy of the process's environment variables. The plugin reads all environment variables from an [`Environment`],
/// never directly from the process.
#[derive(Clone, Debug, Default)]
pub struct Environment(BTreeMap<OsString, OsString>);

impl Environment {
    /// Copies the environment variables of this process.
    pub fn of_this_process() -> Self {
        Self(std::env::vars_os().collect())
    }

    /// Returns the value of an environment variable. An environment variable with an empty value counts as not set.
    pub fn get(&self, name: &str) -> Option<&OsString> {
        self.0.get(std::ffi::OsStr::new(name)).filter(|value| !value.is_empty())
    }

    /// Returns an environment variable as a string, which is empty if the variable is not set. In the returned string,
    /// bytes that are not UTF-8 become replacement characters.
    pub fn text(&self, name: &str) -> String {
        self.get(name).map(|value| value.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Returns false if the environment variable is set to bytes that are not UTF-8.
    fn is_text(&self, name: &str) -> bool {
        self.get(name).is_none_or(|value| value.to_str().is_some())
    }

    #[cfg(test)]
    fn set(&mut self, name: impl Into<OsString>, value: impl Into<OsString>) {
        self.0.insert(name.into(), value.into());
    }

    pub(crate) fn variables(&self) -> impl Iterator<Item = (&OsString, &OsString)> {
        self.0.iter()
    }

    /// Returns the value of an environment variable if the variable is set, even if the value is empty.
    pub fn lookup(&self, name: &str) -> Option<String> {
        self.0.get(std::ffi::OsStr::new(name)).map(|value| value.to_string_lossy().into_owned())
    }
}

impl<K: Into<OsString>, V: Into<OsString>> FromIterator<(K, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(variables: I) -> Self {
        Self(variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}

/// A CNI verb, as named by the variable `CNI_COMMAND`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CniVerb {
    Add,
    Del,
    Check,
    Gc,
    Status,
    Version,
    /// Any value of `CNI_COMMAND` that is not a CNI verb. An unknown verb is refused only after the network
    /// configuration has been read.
    Unknown,
}

impl CniVerb {
    fn parse(word: &str) -> Self {
        let verbs = [Self::Add, Self::Del, Self::Check, Self::Gc, Self::Status, Self::Version];
        verbs.into_iter().find(|verb| verb.name() == word).unwrap_or(Self::Unknown)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Gc => "GC",
            Self::Status => "STATUS",
            Self::Version => "VERSION",
            Self::Unknown => "",
        }
    }

    fn has_attachment(self) -> bool {
        matches!(self, Self::Add | Self::Del | Self::Check)
    }
}

/// Whether a container may be in the plugin's own network namespace (`CNI_NETNS_OVERRIDE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OwnNetns {
    Refused,
    Accepted,
}

/// The values of the `CNI_*` environment variables, as passed to the plugin. A variable that the CNI verb does not need
/// may be unset; its field is then empty.
#[derive(Clone, Debug)]
pub(crate) struct CniCall {
    pub(crate) verb: CniVerb,
    pub(crate) command: String,
    pub(crate) container: String,
    pub(crate) netns: Option<PathBuf>,
    pub(crate) interface: String,
    pub(crate) args: String,
    pub(crate) own_netns: OwnNetns,
}

impl CniCall {
    /// Returns the error for an unknown value of `CNI_COMMAND`.
    pub(crate) fn unknown(&self) -> CniError {
        CniError::new(Code::InvalidEnvironment, format!("unknown CNI_COMMAND: {}", self.command))
    }

    /// Reads and checks the `CNI_*` variables in the order of Go's CNI library. If a variable that the verb needs is
    /// malformed, the error names only this variable; otherwise, one error names all missing variables. As in Go's CNI
    /// library, `CNI_PATH` is required, although the CNI specification does not require this variable.
    ///
    /// # Errors
    /// CNI error code 4 if a `CNI_*` variable is missing or malformed.
    pub(crate) fn from_environment(env: &Environment) -> Result<Self> {
        let command = env.text("CNI_COMMAND");
        let verb = CniVerb::parse(&command);
        let attachment = verb.has_attachment();
        let container = env.text("CNI_CONTAINERID");
        let interface = env.text("CNI_IFNAME");
        if attachment && !container.is_empty() {
            check_container(&container)?;
        }
        if attachment && !interface.is_empty() {
            check_interface(&interface)?;
        }
        let needed = [
            ("CNI_COMMAND", true),
            ("CNI_CONTAINERID", attachment),
            ("CNI_NETNS", matches!(verb, CniVerb::Add | CniVerb::Check)),
            ("CNI_IFNAME", attachment),
            ("CNI_PATH", !matches!(verb, CniVerb::Version | CniVerb::Unknown)),
        ];
        let missing: Vec<_> = needed
            .into_iter()
            .filter(|(name, needed)| *needed && env.get(name).is_none())
            .map(|(name, _)| name)
            .collect();
        if !missing.is_empty() {
            let message = format!("required env variables [{}] missing", missing.join(","));
            return Err(CniError::new(Code::InvalidEnvironment, message));
        }
        // If bytes that are not UTF-8 were converted to text, two interfaces or workloads could get one name, and thus
        // the same address.
        let odd = ["CNI_IFNAME", "CNI_ARGS"].into_iter().find(|name| !env.is_text(name));
        if let Some(name) = odd.filter(|_| verb == CniVerb::Add) {
            return Err(CniError::new(Code::InvalidEnvironment, format!("{name} is not UTF-8")));
        }
        let accepted = env.text("CNI_NETNS_OVERRIDE");
        Ok(Self {
            verb,
            command,
            container,
            netns: env.get("CNI_NETNS").map(PathBuf::from),
            interface,
            args: env.text("CNI_ARGS"),
            own_netns: if accepted == "1" || accepted.eq_ignore_ascii_case("true") {
                OwnNetns::Accepted
            } else {
                OwnNetns::Refused
            },
        })
    }
}

/// True if CNI accepts this name for networks and containers: a letter or digit, then letters, digits and `_.-`.
pub(crate) fn is_valid_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

fn check_container(id: &str) -> Result<()> {
    if is_valid_name(id) {
        return Ok(());
    }
    Err(CniError::new(Code::InvalidEnvironment, "invalid characters in containerID").with_details(id))
}

fn check_interface(name: &str) -> Result<()> {
    let wrong = |message: &str| Err(CniError::new(Code::InvalidEnvironment, message));
    if name.len() > MAX_INTERFACE_NAME {
        let details = format!("interface name should be less than {} characters", MAX_INTERFACE_NAME + 1);
        return wrong("interface name is too long").map_err(|error| error.with_details(details));
    }
    if name == "." || name == ".." {
        return wrong("interface name is . or ..");
    }
    if name.contains(|c: char| matches!(c, '/' | ':') || c.is_whitespace()) {
        return wrong("interface name contains / or : or whitespace characters");
    }
    Ok(())
}

/// The path in `/proc` of the network namespace that the current thread is in.
pub(crate) const OWN_NETNS: &str = "/proc/thread-self/ns/net";

/// True if `path` and `own` refer to the same network namespace. A path that does not exist refers to no network
/// namespace; runtimes pass such a path after the namespace is gone.
///
/// The function only calls stat on `path` and never opens the file, because `path` may name anything, for example a
/// pipe.
pub(crate) fn is_own_netns(path: &Path, own: &Path) -> bool {
    let Ok(theirs) = fs::metadata(path) else { return false };
    fs::metadata(own).is_ok_and(|ours| (theirs.st_dev(), theirs.st_ino()) == (ours.st_dev(), ours.st_ino()))
}

/// Returns the error for a container that is in the plugin's own network namespace.
pub(crate) fn own_netns_error() -> CniError {
    CniError::new(Code::InvalidNetns, "plugin's netns and netns from CNI_NETNS should not be the same")
}

/// The `CNI_ARGS` keys that every verb of Calico's plugin accepts; Calico's ADD parses `CNI_ARGS` again with
/// [`ADDRESS_KEYS`].
const KUBERNETES_KEYS: [&str; 5] =
    ["IgnoreUnknown", "IP", "K8S_POD_NAME", "K8S_POD_NAMESPACE", "K8S_POD_INFRA_CONTAINER_ID"];

/// The keys that Calico's plugin accepts when ADD parses `CNI_ARGS` a second time.
const ADDRESS_KEYS: [&str; 2] = ["IgnoreUnknown", "IP"];

/// The notation of IP addresses that is allowed in `CNI_ARGS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddressForm {
    /// An IP address without a prefix length.
    Bare,
    /// An IP address, optionally with a prefix length that is ignored.
    BareOrCidr,
}

/// The values of the keys in `CNI_ARGS`. If `CNI_ARGS` lacks a key, the field for the key is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CniArgs {
    pub(crate) ip: Option<IpAddr>,
    pub(crate) pod: String,
    pub(crate) pod_namespace: String,
    /// The value of `CNI_TEST_NAMESPACE`, a key that only Calico's own tests use.
    pub(crate) test_namespace: String,
    /// The value of `MARGAY_STICKY`: the sticky name of the workload. `CNI_ARGS` must also contain `IgnoreUnknown=1`,
    /// because Go's CNI library and Calico do not know `MARGAY_STICKY`.
    pub(crate) sticky: String,
}

impl CniArgs {
    /// Parses the value of `CNI_ARGS`. An unknown key in `CNI_ARGS` is an error, unless `CNI_ARGS` contains
    /// `IgnoreUnknown` with a true value.
    ///
    /// # Errors
    /// CNI error code 999 with the messages of Go's CNI library for an invalid `CNI_ARGS`.
    pub(crate) fn parse(text: &str, form: AddressForm) -> Result<Self> {
        load_args(text, &KUBERNETES_KEYS, form)
    }

    /// Parses `CNI_ARGS` a second time, as Calico's ADD does. Unless `CNI_ARGS` contains `IgnoreUnknown`, the second
    /// parse of `CNI_ARGS` refuses the keys that name the pod.
    ///
    /// # Errors
    /// CNI error code 999 for a key that Calico's ADD refuses in its second parse of `CNI_ARGS`, which accepts only
    /// [`ADDRESS_KEYS`].
    pub(crate) fn check_again(text: &str) -> Result<()> {
        load_args(text, &ADDRESS_KEYS, AddressForm::Bare).map(|_| ())
    }
}

fn load_args(text: &str, known: &[&str], form: AddressForm) -> Result<CniArgs> {
    let mut args = CniArgs::default();
    if text.is_empty() {
        return Ok(args);
    }
    let mut ignore_unknown = false;
    let mut unknown = Vec::new();
    for pair in text.split(';') {
        let (key, value) = split_pair(pair)?;
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

/// Splits a `KEY=value` pair of `CNI_ARGS`, which must contain exactly one equals sign.
fn split_pair(pair: &str) -> Result<(&str, &str)> {
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

/// Parses an address. As in Go, an IPv4-mapped IPv6 address (`::ffff:a.b.c.d`) becomes the IPv4 address.
///
/// # Errors
/// Go's error message if the text is not an IP address.
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

    fn call(changes: &[(&str, &str)]) -> Result<CniCall> {
        let mut variables: BTreeMap<&str, &str> = [
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", "/run/netns/a"),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/opt/cni/bin"),
        ]
        .into();
        variables.extend(changes.iter().copied());
        CniCall::from_environment(&variables.into_iter().collect())
    }

    fn error(changes: &[(&str, &str)]) -> (u32, String, String) {
        let error = call(changes).unwrap_err();
        (error.code().number(), error.message().to_owned(), error.details().to_owned())
    }

    fn missing(changes: &[(&str, &str)]) -> String {
        let (code, message, details) = error(changes);
        assert_eq!((code, details.as_str()), (4, ""));
        message
    }

    #[test]
    fn env_needs_per_verb_are_checked() {
        let none = [("CNI_CONTAINERID", ""), ("CNI_NETNS", ""), ("CNI_IFNAME", ""), ("CNI_PATH", "")];
        let with = |verb| [&[("CNI_COMMAND", verb)], &none[..]].concat();
        let all = "required env variables [CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH] missing";
        assert_eq!(missing(&with("ADD")), all);
        assert_eq!(missing(&with("CHECK")), all);
        assert_eq!(missing(&with("DEL")), "required env variables [CNI_CONTAINERID,CNI_IFNAME,CNI_PATH] missing");
        assert_eq!(missing(&with("GC")), "required env variables [CNI_PATH] missing");
        assert_eq!(missing(&with("STATUS")), "required env variables [CNI_PATH] missing");
        assert_eq!(call(&with("VERSION")).unwrap().verb, CniVerb::Version);
        assert_eq!(call(&with("FOO")).unwrap().verb, CniVerb::Unknown);
        assert_eq!(missing(&with("")), "required env variables [CNI_COMMAND] missing");
    }

    #[test]
    fn env_form_errors_come_before_missing_variables() {
        let bad = [("CNI_CONTAINERID", "a b"), ("CNI_IFNAME", "a/b"), ("CNI_PATH", "")];
        assert_eq!(error(&bad), (4, "invalid characters in containerID".into(), "a b".into()));
        assert_eq!(error(&bad[1..]).1, "interface name contains / or : or whitespace characters");
        assert_eq!(error(&bad[2..]).1, "required env variables [CNI_PATH] missing");
        // GC needs neither `CNI_CONTAINERID` nor `CNI_IFNAME`, so GC does not check these two variables.
        assert!(call(&[bad[0], bad[1], ("CNI_COMMAND", "GC")]).is_ok());
    }

    #[test]
    fn env_names_of_containers_and_interfaces_are_checked() {
        for id in ["a", "0", "a.b_c-d", "a-"] {
            assert!(call(&[("CNI_CONTAINERID", id)]).is_ok(), "{id}");
        }
        for id in ["-a", ".a", "_a", "a/b", "ä", "a\n"] {
            assert_eq!(error(&[("CNI_CONTAINERID", id)]).2, id);
        }
        for name in ["eth0", "a", "...", "123456789012345"] {
            assert!(call(&[("CNI_IFNAME", name)]).is_ok(), "{name}");
        }
        let long = (4, "interface name is too long".into(), "interface name should be less than 16 characters".into());
        assert_eq!(error(&[("CNI_IFNAME", "1234567890123456")]), long);
        assert_eq!(error(&[("CNI_IFNAME", "ääääääää")]), long);
        assert_eq!(error(&[("CNI_IFNAME", ".")]).1, "interface name is . or ..");
        for name in ["a:b", "a b", "a\u{a0}b", "a\tb"] {
            assert!(error(&[("CNI_IFNAME", name)]).1.contains("whitespace"), "{name}");
        }
    }

    #[test]
    fn env_is_refused_when_add_has_bytes_that_are_not_text() {
        use std::os::unix::ffi::OsStringExt;
        for name in ["CNI_IFNAME", "CNI_ARGS"] {
            for (verb, accepted) in [("ADD", false), ("DEL", true), ("CHECK", true)] {
                let variables =
                    [("CNI_CONTAINERID", "c1"), ("CNI_NETNS", "/n"), ("CNI_IFNAME", "e"), ("CNI_PATH", "/p")];
                let mut env: Environment = variables.into_iter().chain([("CNI_COMMAND", verb)]).collect();
                env.set(name, OsString::from_vec(b"a=\xff".to_vec()));
                let read = CniCall::from_environment(&env).map(drop).map_err(|error| error.message().to_owned());
                let expected = if accepted { Ok(()) } else { Err(format!("{name} is not UTF-8")) };
                assert_eq!(read, expected, "{verb}");
            }
        }
    }

    #[test]
    fn netns_override_is_read() {
        for (text, expected) in [
            ("1", OwnNetns::Accepted),
            ("true", OwnNetns::Accepted),
            ("TRUE", OwnNetns::Accepted),
            ("yes", OwnNetns::Refused),
            ("0", OwnNetns::Refused),
            ("", OwnNetns::Refused),
        ] {
            assert_eq!(call(&[("CNI_NETNS_OVERRIDE", text)]).unwrap().own_netns, expected, "{text:?}");
        }
    }

    #[test]
    fn netns_is_own_only_when_same_file() {
        let own = Path::new(OWN_NETNS);
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(OWN_NETNS, &link).unwrap();
        assert!(is_own_netns(Path::new("/proc/self/ns/net"), own));
        assert!(is_own_netns(&link, own));
        for other in ["/proc/self/ns/uts", "/no/such/file", "/", "a\0b", ""] {
            assert!(!is_own_netns(Path::new(other), own), "{other:?}");
        }
    }

    fn args_error(text: &str) -> String {
        let error = CniArgs::parse(text, AddressForm::Bare).unwrap_err();
        assert_eq!(error.code().number(), 999);
        error.message().to_owned()
    }

    #[test]
    fn args_are_read() {
        let text = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart;K8S_POD_INFRA_CONTAINER_ID=x;K8S_POD_UID=u;IP=10.0.0.1";
        let args = CniArgs::parse(text, AddressForm::Bare).unwrap();
        let expected = CniArgs {
            ip: Some("10.0.0.1".parse().unwrap()),
            pod: "cart".into(),
            pod_namespace: "shop".into(),
            ..CniArgs::default()
        };
        assert_eq!(args, expected);
        assert_eq!(CniArgs::parse("", AddressForm::Bare).unwrap(), CniArgs::default());
        assert_eq!(CniArgs::parse("IP=1.2.3.4;IP=", AddressForm::Bare).unwrap(), CniArgs::default());
        let mapped = CniArgs::parse("IP=::ffff:10.0.0.1", AddressForm::Bare).unwrap();
        assert_eq!(mapped.ip, args.ip);
        let test = CniArgs::parse("CNI_TEST_NAMESPACE=t;IgnoreUnknown=true", AddressForm::Bare).unwrap();
        assert_eq!(test.test_namespace, "t");
    }

    #[test]
    fn args_are_refused_when_malformed_or_unknown() {
        assert_eq!(args_error("FOO"), "ARGS: invalid pair \"FOO\"");
        assert_eq!(args_error("A=b=c"), "ARGS: invalid pair \"A=b=c\"");
        assert_eq!(args_error(";"), "ARGS: invalid pair \"\"");
        assert_eq!(args_error("IP=1.2.3.4;"), "ARGS: invalid pair \"\"");
        assert_eq!(args_error("FOO=a;ip=1;IgnoreUnknown=0"), "ARGS: unknown args [\"FOO=a\" \"ip=1\"]");
        assert_eq!(
            args_error("IgnoreUnknown=Yes"),
            "ARGS: error parsing value of pair \"IgnoreUnknown=Yes\": boolean unmarshal error: invalid input yes"
        );
        for address in ["foo", "10.0.0.1/24", "010.0.0.1", "1.2.3", "fe80::1%eth0", " 10.0.0.1"] {
            assert_eq!(
                args_error(&format!("IP={address}")),
                format!("ARGS: error parsing value of pair \"IP={address}\": invalid IP address: {address}")
            );
        }
    }

    #[test]
    fn args_ignore_unknown_may_stand_anywhere() {
        for text in ["IgnoreUnknown=1;FOO=a", "FOO=a;IgnoreUnknown=TRUE"] {
            CniArgs::parse(text, AddressForm::Bare).unwrap();
            CniArgs::check_again(text).unwrap();
        }
    }

    #[test]
    fn args_second_reading_refuses_kubernetes_keys() {
        let text = "K8S_POD_NAME=a";
        CniArgs::parse(text, AddressForm::Bare).unwrap();
        assert_eq!(CniArgs::check_again(text).unwrap_err().message(), "ARGS: unknown args [\"K8S_POD_NAME=a\"]");
    }

    #[test]
    fn args_prefix_length_is_dropped_where_allowed() {
        let args = CniArgs::parse("IP=10.0.0.7/24", AddressForm::BareOrCidr).unwrap();
        assert_eq!(args.ip, Some("10.0.0.7".parse().unwrap()));
        assert!(CniArgs::parse("IP=10.0.0.7/33", AddressForm::BareOrCidr).is_err());
    }
}
